"""Config models: frozen, unknown keys forbidden, each field with its unit, bound and one sentence."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    field_validator,
    model_validator,
)

from hpcroll.contract import SegmentRole, Stage, canonical_json, sha256_hex


class Strict(BaseModel):
    """Base of every config model, a plug-in's options included."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


Options = dict[str, JsonValue]
PartitionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$")]


class SamplingConfig(Strict):
    """Sampling parameters that are forced on every call, whatever the agent or the server's defaults say.

    By default a call samples from the model's own distribution, of which every engine returns the
    log-probabilities.
    """

    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """-1: all tokens."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, le=10)
    max_tokens: int | None = Field(default=4096, ge=1)
    """Longest reply in tokens; an agent may ask for less."""
    stop: tuple[str, ...] | None = None
    """Strings that end a reply; the agent's own where null."""


class SeedPolicy(StrEnum):
    """The seed of a call's sampling."""

    RANDOM = "random"
    """None is sent; an agent's own is dropped."""
    DERIVED = "derived"
    """Derived from the rollout, the attempt and the call's number: another one for each call."""
    AGENT = "agent"
    """The agent's, where it sends one."""


class ModelMode(StrEnum):
    """Who turns messages into token ids, and ids into messages."""

    CHAT = "chat"
    """The inference server, by its chat template."""
    TOKENS = "tokens"
    """The gateway: ids go out and come back, and a turn goes on from the very ids that were sampled."""


class EngineKind(StrEnum):
    """The API that an inference server speaks."""

    VLLM = "vllm"
    SGLANG = "sglang"


class TokensConfig(Strict):
    """Mode `tokens`: how the gateway renders messages and reads replies."""

    tokenizer: str = Field(min_length=1)
    """Directory with a `tokenizer.json`, such a file, or a model's name on the hub."""
    renderer: str = "auto"
    """Model family, as the `renderers` package names it; `auto` finds it by the name on the hub."""
    thinking_retention: Literal["tool_cycle", "all"] | None = None
    """How long thinking stays in context: until the next user message, or for good; null: the family's."""
    options: Options = Field(default_factory=dict)
    """The renderer's own options (`enable_thinking`, ...)."""
    scale_out: bool = False
    """Ask vLLM at /inference/v1/generate, which says which weights sampled which token."""


class ModelConfig(Strict):
    """The policy that is sampled, and how."""

    name: str = "policy"
    """Name of the policy in the registry, and of the model as agents see it."""
    served_name: str | None = None
    """Model name that the inference server expects; `name` where absent."""
    endpoints: tuple[str, ...] = ()
    """Base URLs of inference servers, besides those that `hpcroll endpoint` registers."""
    engine: EngineKind = EngineKind.VLLM
    """What the servers of `endpoints` speak; registered ones say it themselves."""
    api_key_env: str | None = None
    """Environment variable that holds the servers' API key."""
    mode: ModelMode = ModelMode.CHAT
    """Who renders: the inference server, or the gateway."""
    tokens: TokensConfig | None = None
    """Required in mode `tokens`."""
    sampling: SamplingConfig = SamplingConfig()
    """Forced on every call, whatever the agent or the server's defaults say."""
    seeds: SeedPolicy = SeedPolicy.RANDOM
    """The seed of each call."""
    context_tokens: int = Field(default=32_768, ge=64)
    """Longest prompt plus reply, in tokens, that a call may have."""
    rollout_tokens: int = Field(default=1_000_000, ge=1)
    """Most tokens that one rollout may sample, over all its calls."""
    logprobs: Literal["raw", "sampling"] = "raw"
    """Of which distribution the servers' log-probabilities are: the model's own at temperature 1, or the one
    that is sampled from (vLLM's `--logprobs-mode processed_logprobs`)."""
    call_timeout_s: float = Field(default=600.0, gt=0)
    """Longest that one model call may take, in seconds."""
    call_tries: int = Field(default=4, ge=1, le=20)
    """How often a call that no server answered is tried, with back-off, before the attempt fails."""
    train_on_shaped_logprobs: bool = False
    """Also train on calls whose log-probabilities are not those of their sampling distribution."""
    train_roles: tuple[SegmentRole, ...] = (SegmentRole.MAIN,)
    """Roles of segments that are trained on; the others are recorded all the same."""

    @model_validator(mode="after")
    def _tokens_has_its_settings(self) -> Self:
        if self.mode is ModelMode.TOKENS and self.tokens is None:
            raise ValueError("mode tokens needs tokens.tokenizer (and tokens.renderer)")
        return self


class HarnessConfig(Strict):
    """The agent program."""

    name: str = "react"
    """Entry point `hpcroll.harnesses`, or a dotted path."""
    max_turns: int = Field(default=40, ge=1)
    """Model calls after which the agent is stopped (`turn_limit`)."""
    command_timeout_s: float = Field(default=60.0, gt=0)
    """Longest that one tool call of the agent may take, in seconds."""
    output_bytes: int = Field(default=16_384, ge=256)
    """Most bytes of each output stream of a tool call that the agent is shown."""
    options: Options = Field(default_factory=dict)
    """The harness's own options."""


class StartLimits(Strict):
    """How many sandboxes may start at once: many simultaneous starts fail at random."""

    per_node: int = Field(default=8, ge=1)
    """On one node, over all its workers."""
    per_image: int = Field(default=4, ge=1)
    """Of one image in one worker."""


class SandboxConfig(Strict):
    """The rootless container that payloads run in."""

    name: str = "apptainer"
    """Entry point `hpcroll.sandboxes` (`apptainer`, `bwrap`, `host`), or a dotted path."""
    image: str | None = None
    """Default image: a SIF file or directory for apptainer; `host` or a directory for bwrap."""
    network: bool = False
    """Give payloads the node's network; off, they reach the model gateway and nothing else."""
    scratch: Path = Path("/tmp")
    """Node-local directory for writable roots and sockets; never on the shared file system."""
    binds: tuple[str, ...] = ()
    """Further read-only binds, as SOURCE or SOURCE:TARGET."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of every payload; nothing of the node's environment is passed on."""
    memory_mb: int | None = Field(default=None, ge=16)
    """Memory limit of one sandbox in MiB; refused where it cannot be enforced."""
    disk_mb: int | None = Field(default=None, ge=16)
    """Limit on what a payload may write, in MiB; refused where it cannot be enforced."""
    file_mb: int = Field(default=1024, ge=1)
    """Largest file that a payload may write, in MiB."""
    processes: int = Field(default=512, ge=8)
    """Most processes that a payload may have where the sandbox can count them."""
    start_limits: StartLimits = StartLimits()
    options: Options = Field(default_factory=dict)
    """The sandbox's own options."""


class StageConfig(Strict):
    width: int = Field(ge=1, le=1024)
    """Rollouts of one worker in this stage at once."""
    timeout_s: float = Field(gt=0)
    """Longest that a rollout may be in this stage, in seconds; time in a queue does not count."""


class TimeoutRule(StrEnum):
    """What becomes of a rollout whose agent ran into a limit."""

    GRADE = "grade"
    """Evaluate what it left, and train on it."""
    MASK = "mask"
    """Evaluate what it left, but do not train on it."""
    DROP = "drop"
    """Do not evaluate; no reward."""


class StagesConfig(Strict):
    """Widths and deadlines of the three stages."""

    init: StageConfig = StageConfig(width=4, timeout_s=600)
    run: StageConfig = StageConfig(width=8, timeout_s=1800)
    eval: StageConfig = StageConfig(width=4, timeout_s=900)
    ready: int = Field(default=2, ge=0)
    """Initialised sandboxes that may wait for a free run slot."""
    overlap: bool = True
    """Off: a worker takes one rollout at a time through all stages (for comparison)."""
    on_timeout: TimeoutRule = TimeoutRule.GRADE
    """What becomes of a rollout that was stopped by a turn, token, context or time limit."""
    drain_grace_s: float = Field(default=0.0, ge=0)
    """Seconds that rollouts in flight may still take after a drain began; then they are released."""

    def of(self, stage: Stage) -> StageConfig:
        """The width and deadline of `stage`."""
        return {Stage.INIT: self.init, Stage.RUN: self.run, Stage.EVAL: self.eval}[stage]


class AttemptCaps(Strict):
    """Attempts after which a rollout is committed as `failed`, by the class of the failures."""

    task: int = Field(default=1, ge=1)
    infra: int = Field(default=3, ge=1)
    policy: int = Field(default=3, ge=1)
    kill: int = Field(default=3, ge=1)
    silence: int = Field(default=10, ge=1)
    """Takeovers on silence alone; never counted towards the other caps."""


class LeaseConfig(Strict):
    """Heartbeats and takeover."""

    beat_s: float = Field(default=15.0, gt=0)
    """Seconds between two heartbeats of a worker."""
    silence_s: float = Field(default=180.0, gt=0)
    """Silence after which a worker counts as gone; at least six heartbeats."""
    scheduler_poll_s: float = Field(default=60.0, gt=0)
    """Least seconds between two queries to the scheduler by one worker."""

    @model_validator(mode="after")
    def _six_beats(self) -> Self:
        if self.silence_s < 6 * self.beat_s:
            raise ValueError(
                f"silence_s {self.silence_s:g} is less than six heartbeats ({6 * self.beat_s:g} s)"
            )
        return self


class EvaluationConfig(Strict):
    """Verifiers."""

    log_bytes: int = Field(default=8_192, ge=0)
    """Bytes at the end of the verifier's output that the verdict keeps."""


class ShardConfig(Strict):
    """Trajectory shards."""

    level: int = Field(default=3, ge=1, le=19)
    """zstd compression level."""
    commit_window_s: float = Field(default=0.005, ge=0, le=5)
    """Commits that arrive within this time share one fsync."""
    shard_mb: int = Field(default=256, ge=1)
    """Size in MiB after which a worker opens its next shard."""
    pack: Literal["off", "auto"] = "off"
    """`auto`: rank 0 of the last leg packs whole groups in a process beside its worker."""
    pack_mb: int = Field(default=256, ge=1)
    """Size in MiB at which a pack is closed, and of shards below which nothing is packed on its own."""
    pack_level: int = Field(default=6, ge=1, le=19)
    """zstd compression level of packs."""
    pack_logprobs: Literal["float32", "float16"] = "float32"
    """How packs store log-probabilities; they are read as float32 either way."""
    retain: bool = False
    """Whether that process deletes shards that packs hold wholly and no trainer still reads."""
    dictionary: Annotated[str, StringConstraints(min_length=1)] = "auto"
    """Compress records with what the run's first ones have in common: `auto`, `off`, or the file of another
    run's dictionaries (its `shards/dict.0`)."""

    @field_validator("dictionary", "pack", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: Any) -> Any:
        return "off" if value is False else value  # what YAML makes of a bare `off`


class LaunchConfig(Strict):
    """How workers are started."""

    launcher: str = "slurm"
    """Entry point `hpcroll.launchers` (`slurm`, `local`), or a dotted path."""
    partition: dict[str, PartitionName] | PartitionName | None = None
    """Slurm partition; a mapping from leg name (for example `eval`) where legs are split."""
    time_min: int = Field(default=240, ge=1)
    """Time limit of a job in minutes."""
    cpus: int = Field(default=2, ge=1)
    """CPUs of one worker."""
    memory_mb: int | None = Field(default=None, ge=64)
    """Memory of one worker in MiB; the partition's default where absent."""
    signal_s: int = Field(default=120, ge=10)
    """Seconds before its time limit at which a worker is told to drain."""
    array_parallelism: int | None = Field(default=None, ge=1)
    """Most array tasks of one launch that run at once."""
    restarts: int = Field(default=100, ge=0)
    """Restarts of a job, for whatever reason, after which it no longer requeues itself."""
    idle_s: float = Field(default=30.0, ge=0)
    """Seconds without any unfinished rollout after which a worker ends."""
    window_wait_s: float = Field(default=1800.0, ge=0)
    """Seconds of waiting for the trainer's window or its pool, without work, after which a worker ends."""
    setup: tuple[str, ...] = ()
    """Shell lines run in the job before the worker starts (module load, export ...)."""
    sbatch: dict[str, JsonValue] = Field(default_factory=dict)
    """Any further sbatch directive, by its long name (`account: x`, `exclusive: true`)."""
    python: str | None = None
    """Interpreter of the workers; the submitter's own where absent."""


class RunConfig(Strict):
    """Everything that a run is configured by; the resolved copy stands in the run directory."""

    model: ModelConfig = ModelConfig()
    harness: HarnessConfig = HarnessConfig()
    sandbox: SandboxConfig = SandboxConfig()
    stages: StagesConfig = StagesConfig()
    legs: tuple[tuple[Stage, ...], ...] = ((Stage.INIT, Stage.RUN, Stage.EVAL),)
    """The stages that one worker does under one claim, leg after leg."""
    attempts: AttemptCaps = AttemptCaps()
    lease: LeaseConfig = LeaseConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    shards: ShardConfig = ShardConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _legs_cover_the_stages(self) -> Self:
        flat = [stage for leg in self.legs for stage in leg]
        if flat != list(Stage) or not all(self.legs):
            raise ValueError("legs must be [init, run, eval] in this order, cut into non-empty parts")
        if self.legs[0] == (Stage.INIT,):
            raise ValueError("a leg of init alone is refused: its sandbox cannot move to another node")
        return self

    @property
    def leg_names(self) -> tuple[str, ...]:
        """The legs' names: their stages joined by `+`, for example `init+run`."""
        return tuple("+".join(leg) for leg in self.legs)

    def digest(self) -> str:
        """SHA-256 (hex) of the resolved config."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")).encode())
