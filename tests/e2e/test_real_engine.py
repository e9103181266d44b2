"""A real inference engine behind the gateway: what the shards claim is what the weights say.

The log-probabilities are recomputed by tests/engine/recompute.py, which reads the shards by their documented
format and knows nothing of the project.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcroll.api import Run
from hpcroll.contract import Task
from hpcroll.launch import JobState
from hpcroll.policy import EndpointLease
from hpcroll.report.endpoint_check import check_endpoint
from hpcroll.report.finding import Level
from hpcroll.shards import verify_run
from tests.capabilities import AGENTS, IMAGES, need
from tests.engine.server import MODEL, PYTHON, Checkpoints, EngineServer

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

RECOMPUTE = Path(__file__).parents[1] / "engine" / "recompute.py"
BEAT_S = 5.0
WAIT_S = 400.0
ENDED = (JobState.DONE, JobState.FAILED)
TEACH_STEPS = 400
CHANCE = 6.0
"""Standard deviations of chance: beyond it tokens were not drawn from the recorded distribution."""


@dataclass(frozen=True)
class Engine:
    """The server that runs for all tests here, and its two sets of weights."""

    server: EngineServer
    checkpoints: Checkpoints

    def load(self, version: int, *, mode: str = "wait") -> None:
        self.server.load(self.checkpoints.weights[version], version=version, mode=mode)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    need("engine")
    need("bwrap")
    root = tmp_path_factory.mktemp("engine")
    checkpoints = Checkpoints.make(root)
    with EngineServer(root, checkpoints.weights[0]) as server:
        yield Engine(server, checkpoints)


class Fleet:
    """The run's one endpoint: registered with the version that it serves, and beating."""

    def __init__(self, run: Run, url: str) -> None:
        self._run = run
        self._url = url
        self._lease: EndpointLease | None = None
        self._said = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def serve(self, version: int, *, said: bool) -> None:
        """Registers the server anew, unless it is and nothing is `said` of its version."""
        old = self._lease
        if old is not None and not said:
            return
        self._said = said
        self._lease = self._run.policy.register_endpoint(
            self._url, MODEL, kind="vllm", version=version if said else None
        )
        if old is not None:
            old.withdraw()

    def follow(self, version: int) -> None:
        """The server has other weights now."""
        self.serve(version, said=self._said)

    @contextmanager
    def beating(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()
            if self._lease is not None:
                self._lease.withdraw()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            if (lease := self._lease) is not None:
                lease.beat()


@dataclass(frozen=True)
class Mode:
    """How the gateway talks to the engine."""

    name: str
    scale_out: bool = False

    @property
    def engine_says(self) -> bool:
        """Whether the engine itself names the version of each token."""
        return self.scale_out

    def config(self, engine: Engine) -> dict[str, Any]:
        if self.name == "chat":
            return {"mode": "chat"}
        tokenizer = str(engine.checkpoints.tokenizer)
        tokens = {"tokenizer": tokenizer, "renderer": "qwen3", "scale_out": self.scale_out}
        return {"mode": "tokens", "tokens": tokens}


CHAT, COMPLETIONS, GENERATE = Mode("chat"), Mode("tokens"), Mode("tokens", scale_out=True)
MODES = [
    pytest.param(CHAT, id="chat"),
    pytest.param(COMPLETIONS, id="tokens-completions"),
    pytest.param(GENERATE, id="tokens-generate"),
]


def make_run(
    root: Path,
    engine: Engine,
    *,
    mode: Mode = CHAT,
    harness: dict[str, Any] | None = None,
    sandbox: dict[str, Any] | None = None,
    **model: Any,
) -> Run:
    sampling = {"max_tokens": 48, **model.pop("sampling", {})}
    common = {"name": MODEL, "context_tokens": 16_384, "sampling": sampling}
    config = {
        "model": {**common, **mode.config(engine), **model},
        "harness": {"name": "react", "max_turns": 6, **(harness or {})},
        "sandbox": sandbox or {"name": "bwrap", "image": "host"},
        "stages": {"run": {"width": 2, "timeout_s": WAIT_S}},
        "launch": {"launcher": "local", "idle_s": 0},
        "shards": {"dictionary": "off"},  # which the other program does without
    }
    return Run.create(root / "run", config=config)


def tasks(count: int) -> list[Task]:
    return [
        Task(task_id=f"sum-{number}", handler="math", prompt=f"What is {number} + 1?", spec={"answer": "1"})
        for number in range(count)
    ]


def recompute(run: Run, *weights: Path, arguments: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
    """Exit status and report; `weights[v]` are taken for those of version v."""
    argv = [str(PYTHON), "-I", str(RECOMPUTE), str(run.path), *arguments]
    for version, path in enumerate(weights):
        argv += ["--weights", f"{version}={path}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    print(f"recompute {' '.join(arguments)}: {report}")
    return done.returncode, report


def roll_out(
    run: Run,
    engine: Engine,
    *,
    rollouts: int,
    said: bool = True,
    then: Callable[[Run, Engine, Fleet], None] = lambda run, engine, fleet: None,
) -> None:
    """Runs rollouts, the last third of them after `then`; `said`: the endpoint tells its version."""
    engine.load(0)
    run.policy.publish(0, weights=str(engine.checkpoints.weights[0]))
    fleet = Fleet(run, engine.server.url)
    fleet.serve(0, said=said)
    every, later = tasks(rollouts), rollouts // 3
    run.submit(every[later:], key="first")
    if later:
        run.submit(every[:later], key="later")
        run.hold("later")
    with fleet.beating():
        handles = run.launch(workers=1)
        then(run, engine, fleet)
        if later:
            run.resume("later")
        wait_for(lambda: committed(run) == rollouts, "all results")
        wait_for(lambda: all(state in ENDED for state in run.job_states(handles)), "end of the worker")
    report = verify_run(run.path)
    assert report.ok, report


def change_weights(run: Run, engine: Engine, fleet: Fleet) -> None:
    """Between two calls, once a rollout is done; others are under way."""
    wait_for(lambda: committed(run) > 0, "first results")
    with run.policy.paused(drain_s=60) as outcome:
        assert outcome.complete, outcome.waiting
        run.policy.publish(1, weights=str(engine.checkpoints.weights[1]))
        engine.load(1)
        fleet.follow(1)


def change_weights_within_calls(run: Run, engine: Engine, fleet: Fleet) -> None:
    """While the engine is sampling: it holds the calls and goes on with them."""
    while True:
        wait_for(lambda: engine.server.running() > 1, "calls under way")
        with run.policy.paused(mode="keep") as outcome:
            assert outcome.complete, outcome.waiting
            if engine.server.running():
                run.policy.publish(1, weights=str(engine.checkpoints.weights[1]))
                engine.load(1, mode="keep")
                return


def committed(run: Run) -> int:
    return sum(1 for _ in run.results(wait=False))


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} after {WAIT_S:g} s"
        time.sleep(0.2)


def assert_the_weights_say_so(run: Run, engine: Engine, *, versions: set[str]) -> dict[str, Any]:
    """The recomputation agrees, and would not with swapped weights or a shifted axis."""
    zero, one = engine.checkpoints.weights
    status, report = recompute(run, zero, one)
    assert status == 0, report
    assert set(report["tokens_by_version"]) == versions, report
    status, swapped = recompute(run, one, zero)
    assert status == 1
    assert swapped["disagreeing"] > 0.7 * swapped["tokens"]
    status, shifted = recompute(run, zero, one, arguments=("--axis-offset", "1"))
    assert status == 1
    assert shifted["disagreeing"] > 0.7 * shifted["tokens"]
    return report


@pytest.mark.parametrize("mode", MODES)
def test_each_token_has_its_log_probability_under_the_version_that_is_recorded(
    tmp_path: Path, engine: Engine, mode: Mode
) -> None:
    run = make_run(tmp_path, engine, mode=mode)
    roll_out(run, engine, rollouts=9, said=not mode.engine_says, then=change_weights)
    report = assert_the_weights_say_so(run, engine, versions={"0", "1"})
    assert report["tokens_by_kind"] == {"raw": report["tokens"]}
    assert report["calls_of_two_versions"] == 0
    assert report["vague_tokens"] == 0
    assert report["trained_tokens"] > 1000
    assert abs(report["surprise_z"]) < CHANCE


@pytest.mark.parametrize("mode", [MODES[0], MODES[2]])
def test_a_call_that_sees_two_versions_is_recorded_as_such(
    tmp_path: Path, engine: Engine, mode: Mode
) -> None:
    run = make_run(tmp_path, engine, mode=mode, sampling={"max_tokens": 4000}, harness={"max_turns": 2})
    roll_out(run, engine, rollouts=2, said=False, then=change_weights_within_calls)
    status, report = recompute(run, *engine.checkpoints.weights)
    assert status == 0, report
    assert report["calls_of_two_versions"] >= 1
    if mode.engine_says:
        assert report["vague_tokens"] == 0
    # A record that hides the change would be noticed.
    status, report = recompute(run, engine.checkpoints.weights[0], engine.checkpoints.weights[0])
    assert status == 1, report


@pytest.mark.parametrize("opts_in", [False, True])
def test_a_temperature_leaves_raw_log_probabilities_that_are_trained_on_only_by_choice(
    tmp_path: Path, engine: Engine, opts_in: bool
) -> None:
    run = make_run(tmp_path, engine, sampling={"temperature": 0.7}, train_on_shaped_logprobs=opts_in)
    roll_out(run, engine, rollouts=2)
    status, report = recompute(run, engine.checkpoints.weights[0])
    assert status == 0, report
    assert report["tokens_by_kind"] == {"raw": report["tokens"]}
    assert [result.trainable for result in run.results(wait=False)] == [opts_in, opts_in]
    if opts_in:
        # Drawn at 0.7, recorded at 1: likelier than such draws are.
        assert report["trained_tokens"] == report["tokens"]
        assert report["surprise_z"] < -CHANCE
    else:
        assert report["trained_tokens"] == 0


def test_the_doctor_finds_the_engine_fit_and_says_what_it_does_not_tell(engine: Engine) -> None:
    findings = list(check_endpoint(engine.server.url, MODEL))
    assert not [finding for finding in findings if finding.level is Level.ERROR], findings
    warnings = " ".join(finding.text for finding in findings if finding.level is Level.WARNING)
    assert "names no policy version" in warnings
    assert "are those of temperature 1, whatever the temperature" in warnings


@pytest.fixture(scope="module")
def acting(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The same server with weights that call the tool `bash` in most replies."""
    return Engine(engine.server, Checkpoints.make(tmp_path_factory.mktemp("acting"), teach=TEACH_STEPS))


@pytest.mark.apptainer
@pytest.mark.parametrize("mode", [MODES[0], MODES[2]])
@pytest.mark.parametrize("name", ["mini_swe_agent", "pi"])
def test_an_agent_that_acts_on_what_a_real_engine_sampled_is_recorded_token_by_token(
    tmp_path: Path, acting: Engine, name: str, mode: Mode
) -> None:
    need(f"agent:{name}")
    harness = {"name": name, "options": {"store": str(AGENTS)}, "max_turns": 5}
    scratch = os.environ.get("TMPDIR", "/tmp")
    sandbox = {"name": "apptainer", "image": str(IMAGES / "base"), "scratch": scratch}
    sampling = {"max_tokens": 160}
    run = make_run(tmp_path, acting, mode=mode, harness=harness, sandbox=sandbox, sampling=sampling)
    roll_out(run, acting, rollouts=6, said=not mode.engine_says, then=change_weights)
    report = assert_the_weights_say_so(run, acting, versions={"0", "1"})
    assert report["vague_tokens"] == 0
    records = [result.trajectory().record for result in run.results(wait=False)]
    replies = [call.reply for record in records for call in record.calls]
    assert any(isinstance(reply, dict) and reply.get("tool_calls") for reply in replies), replies
    if mode is GENERATE:
        # Turns go on from the very ids that were sampled.
        assert any(len(record.call_spans) > len(record.segments) for record in records)
