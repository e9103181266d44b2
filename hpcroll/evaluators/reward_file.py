"""Any verifier that writes a reward into a file."""

from __future__ import annotations

import json
import math
import time
from typing import ClassVar

from pydantic import Field, field_validator

from hpcroll.config import EvaluationConfig, Strict
from hpcroll.contract import Task, Verdict
from hpcroll.errors import EvaluatorError, ImageError, SandboxError
from hpcroll.evaluators.base import Artefacts, FreshSandbox
from hpcroll.evaluators.commands import Command, command_argv, tail
from hpcroll.evaluators.trees import Tree, is_inside, put_tree
from hpcroll.sandboxes.base import ExecResult, Sandbox

PRIVATE = ".hpcroll"
_REWARD_BYTES = 1 << 20
_UNPACK_S = 300.0


class CommandSpec(Strict):
    """A job in any image, and a command that says how well it was done."""

    files: Tree | None = None
    """Files in the work directory, for the agent and for the verifier."""
    setup: Command | None = None
    """Run once in the work directory before the agent starts, and again in the verifier's sandbox."""
    setup_timeout_s: float = Field(default=300.0, gt=0)
    """Longest that `setup` may take, in seconds."""
    outputs: tuple[str, ...] = (".",)
    """Paths, relative to the work directory, that travel from the agent's sandbox to the verifier's."""
    outputs_bytes: int = Field(default=8 << 20, ge=1024, le=16 << 20)
    """Most bytes of the outputs, packed with gzip; past it the reward is 0."""
    verifier: Tree | None = None
    """Hidden files of the verifier; never in a sandbox of the agent."""
    verifier_path: str = "verifier"
    """Where they are put: absolute, or relative to the work directory."""
    verify: Command
    """Run in the work directory of a fresh sandbox that has the outputs; writes the reward."""
    verify_timeout_s: float = Field(default=600.0, gt=0)
    """Longest that `verify` may take, in seconds."""
    reward_path: str = "reward.txt"
    """File with one number; or, if it ends in .json, an object with `reward` and further named numbers."""
    solution: str | None = None
    """A line for `sh` that does the job; never in a sandbox of the agent."""
    solution_answer: str = ""
    """What to submit after it, for a verifier that looks at the answer."""

    @field_validator("outputs")
    @classmethod
    def _inside(cls, outputs: tuple[str, ...]) -> tuple[str, ...]:
        for path in outputs:
            if path != "." and not is_inside(path):
                raise ValueError(f"{path!r} is not a relative path inside the work directory")
        return outputs


async def prepare(spec: CommandSpec, sandbox: Sandbox) -> None:
    """The task's files in place and its set-up done; raises `ImageError` where the set-up fails."""
    if spec.files is not None:
        await put_tree(spec.files, sandbox, sandbox.workdir)
    if spec.setup is None:
        return
    result = await sandbox.exec(command_argv(spec.setup), timeout_s=spec.setup_timeout_s, cwd=sandbox.workdir)
    if result.exit_code != 0:
        image = sandbox.spec.image or "the default image"
        raise ImageError(f"the task's setup fails in {image}: {tail(result)}; fix `setup` or the image")


async def pack_outputs(spec: CommandSpec, sandbox: Sandbox) -> Artefacts:
    """What the agent left at the task's output paths: `outputs`, or `outputs_error`.

    Raises `SandboxError` only where the sandbox itself is gone.
    """
    archive = f"{sandbox.workdir}/{PRIVATE}/outputs.tar.gz"
    script = """
    set -e; archive=$1; shift; mkdir -p "$(dirname "$archive")"
    for path; do shift; [ ! -e "$path" ] && [ ! -L "$path" ] || set -- "$@" "$path"; done
    tar --exclude=./.hpcroll --exclude=.hpcroll -czf "$archive" --files-from=/dev/null -- "$@"
    wc -c < "$archive"
    """
    try:
        argv = ("sh", "-c", script, "sh", archive, *spec.outputs)
        result = await sandbox.exec(argv, timeout_s=_UNPACK_S, cwd=sandbox.workdir)
        if result.exit_code != 0:
            return {"outputs_error": f"the outputs cannot be packed: {tail(result)}".encode()}
        size = int(result.stdout)
        if size > spec.outputs_bytes:
            reason = f"the outputs have {size} bytes, more than the limit of {spec.outputs_bytes}"
            return {"outputs_error": reason.encode()}
        return {"outputs": await sandbox.get(archive, limit_bytes=spec.outputs_bytes)}
    except SandboxError as error:
        # A full disk or a deleted work directory is the agent's doing; a dead sandbox is not.
        if not await sandbox.alive():
            raise
        return {"outputs_error": f"the outputs cannot be packed: {error}".encode()}


class RewardFileEvaluator:
    """Runs the verifier over the agent's outputs and reads the reward that it wrote."""

    Spec: ClassVar[type[Strict]] = CommandSpec

    def __init__(self, config: EvaluationConfig) -> None:
        self._log_bytes = config.log_bytes

    async def evaluate(self, task: Task, artefacts: Artefacts, fresh: FreshSandbox) -> Verdict:
        """The verifier's verdict; no reward where it wrote none, since nobody knows whose fault that is."""
        started_s = time.monotonic()
        spec = CommandSpec.model_validate(task.spec)
        reward: float | None = 0.0
        components: dict[str, float] = {}
        because, exit_code = None, None
        log = artefacts.get("outputs_error", b"").decode(errors="replace")
        if not log:
            async with fresh() as sandbox:
                await prepare(spec, sandbox)
                log = await _unpack(artefacts.get("outputs", b""), sandbox)
                if not log:
                    result, text = await self._verify(spec, artefacts, sandbox)
                    exit_code, log = result.exit_code, tail(result, self._log_bytes)
                    try:
                        reward, components = read_reward(text, is_json=spec.reward_path.endswith(".json"))
                    except ValueError as error:
                        reward, because = None, f"no reward in {spec.reward_path}: {error}"
        return Verdict(
            reward=reward,
            no_reward_because=because,
            components=components,
            evaluator="reward_file",
            exit_code=exit_code,
            log_tail=log[-self._log_bytes :] if self._log_bytes else "",
            duration_s=time.monotonic() - started_s,
        )

    async def _verify(
        self, spec: CommandSpec, artefacts: Artefacts, sandbox: Sandbox
    ) -> tuple[ExecResult, bytes]:
        reward = _inside_workdir(sandbox, spec.reward_path)
        verifier = _inside_workdir(sandbox, spec.verifier_path)
        answer = f"{sandbox.workdir}/{PRIVATE}/answer.txt"
        # Neither a reward nor a verifier of the agent's own making may be found at those places.
        stale = (reward, verifier) if spec.verifier is not None else (reward,)
        await _run(("rm", "-rf", "--", *stale), sandbox)
        await _run(("mkdir", "-p", "--", reward.rpartition("/")[0] or "/"), sandbox)
        if spec.verifier is not None:
            await put_tree(spec.verifier, sandbox, verifier)
        await sandbox.put(artefacts.get("answer", b""), answer)
        result = await sandbox.exec(
            command_argv(spec.verify),
            timeout_s=spec.verify_timeout_s,
            cwd=sandbox.workdir,
            env={"HPCROLL_REWARD": reward, "HPCROLL_ANSWER": answer},
            output_bytes=max(self._log_bytes, 4096),
        )
        try:
            return result, await sandbox.get(reward, limit_bytes=_REWARD_BYTES)
        except FileNotFoundError:
            return result, b""


def read_reward(text: bytes, *, is_json: bool) -> tuple[float, dict[str, float]]:
    """The reward in a verifier's file, and its named components; raises `ValueError` where there is none."""
    if not text.strip():
        raise ValueError("the verifier wrote nothing")
    if not is_json:
        return _finite(text.decode()), {}
    data = json.loads(text)
    if not isinstance(data, dict) or "reward" not in data:
        raise ValueError("expected an object with the key `reward`")
    return _finite(data.pop("reward")), {str(name): _finite(value) for name, value in data.items()}


def _finite(value: object) -> float:
    if not isinstance(value, str | int | float):
        raise ValueError(f"{value!r:.80} is not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r:.80} is not finite")
    return number


def _inside_workdir(sandbox: Sandbox, path: str) -> str:
    return path if path.startswith("/") else f"{sandbox.workdir}/{path}"


async def _unpack(outputs: bytes, sandbox: Sandbox) -> str:
    """Why the outputs do not unpack, or nothing."""
    if not outputs:
        return ""
    # Unpacked inside: an archive made in an agent's sandbox is hostile to whoever unpacks it outside.
    archive = f"{sandbox.workdir}/{PRIVATE}/outputs.tar.gz"
    await sandbox.put(outputs, archive)
    result = await sandbox.exec(("tar", "-xzf", archive), timeout_s=_UNPACK_S, cwd=sandbox.workdir)
    return "" if result.exit_code == 0 else f"the outputs cannot be unpacked: {tail(result)}"


async def _run(argv: tuple[str, ...], sandbox: Sandbox) -> None:
    result = await sandbox.exec(argv, timeout_s=_UNPACK_S, cwd=sandbox.workdir)
    if result.exit_code != 0:
        raise EvaluatorError(f"{argv[0]} failed in {sandbox.spec.name}: {tail(result)}")
