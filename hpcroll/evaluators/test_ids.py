"""Hidden tests, scored test by test: what the pytest and unittest evaluators share.

Results come from a reporter that the test runner loads, through a file with a random name; what the code
under test prints, and its exit code, decide nothing. A test that is not reported did not pass. What this
does not stop: code under test shares the runner's process, so a patch written against this very reporter
could still forge a report. Changes to the usual places for that (conftest.py, sitecustomize.py, a module
that shadows the runner) are dropped before the tests run; whoever needs more reads the patches that earn
a reward: their digest is in the verdict.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from typing import ClassVar

from hpcroll.config import EvaluationConfig, Strict
from hpcroll.contract import Task, Verdict, sha256_hex
from hpcroll.errors import EvaluatorError, SandboxError
from hpcroll.evaluators.base import Artefacts, FreshSandbox
from hpcroll.evaluators.commands import command_argv, tail
from hpcroll.evaluators.repository import PRIVATE, RepositorySpec, apply_patch, lay_out, place_tests
from hpcroll.sandboxes.base import Sandbox

_REPORT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Reporter:
    """What makes a test runner report: a module, and the environment that makes the runner load it."""

    module: str
    """Name of the module, `{token}` standing for the random part."""
    source: str
    """Appends one JSON line {"id": ..., "passed": ...} per result to its own path with suffix .jsonl."""
    env: dict[str, str]
    """Environment of the test command, `{module}` standing for the module's name."""
    needs: str
    """A module that the image's Python, or the task's requirements, must have."""


@dataclass(frozen=True, slots=True)
class TestRun:
    """One run of a test command: the ids that passed, and those that were reported and did not."""

    __test__ = False  # pytest collects classes of this name

    passed: frozenset[str]
    failed: frozenset[str]
    exit_code: int | None
    timed_out: bool
    log: bytes


class RepositoryEvaluator:
    """Applies the patch in a fresh sandbox, puts the hidden tests over it, and runs them."""

    Spec: ClassVar[type[Strict]] = RepositorySpec
    name: ClassVar[str]
    reporter: ClassVar[Reporter]

    def __init__(self, config: EvaluationConfig) -> None:
        self._log_bytes = config.log_bytes

    async def evaluate(self, task: Task, artefacts: Artefacts, fresh: FreshSandbox) -> Verdict:
        """Reward 1.0 where every test that has to pass does, else 0.0; components are the fractions.

        Raises `EvaluatorError` where the image cannot run tests at all.
        """
        started_s = time.monotonic()
        spec = RepositorySpec.model_validate(task.spec)
        patch = artefacts.get("patch", b"")
        reason = artefacts.get("patch_error", b"").decode(errors="replace") or None
        if reason is None:
            async with fresh() as sandbox:
                await lay_out(spec, sandbox)
                await self.check_runner(task, sandbox)
                reason = await apply_patch(spec, sandbox, patch)
                if reason is None:
                    await place_tests(spec, sandbox)
                    run = await self.run_tests(spec, sandbox)
                    return self._score(spec, run, patch, time.monotonic() - started_s)
        return Verdict(
            reward=0.0,
            evaluator=self.name,
            components={"fail_to_pass": 0.0, "pass_to_pass": 0.0},
            patch_sha256=sha256_hex(patch),
            log_tail=reason[-self._log_bytes :] if self._log_bytes else "",
            duration_s=time.monotonic() - started_s,
        )

    async def check_runner(self, task: Task, sandbox: Sandbox) -> None:
        """Raises `EvaluatorError` where the laid-out sandbox has no test runner."""
        find = f"import importlib.util as u, sys; sys.exit(u.find_spec({self.reporter.needs!r}) is None)"
        argv = (f"{PRIVATE}/bin/python", "-c", find)
        result = await sandbox.exec(argv, timeout_s=60, cwd=sandbox.workdir)
        if result.exit_code != 0:
            raise EvaluatorError(
                f"task {task.task_id}: {sandbox.spec.image or 'the default image'} has no Python with "
                f"{self.reporter.needs} ({tail(result)}); add it to the image or to the task's deps"
            )

    async def run_tests(self, spec: RepositorySpec, sandbox: Sandbox) -> TestRun:
        """Runs the test command in a laid-out sandbox whose tests are in place."""
        token = secrets.token_hex(8)
        module = self.reporter.module.format(token=token)
        home = f"{sandbox.workdir}/{PRIVATE}/report-{token}"
        await sandbox.put(self.reporter.source.encode(), f"{home}/{module}.py")
        # PATH is the image's own business; ours goes in front of it.
        enter = ("sh", "-c", 'PATH="$1:$PATH"; export PATH; shift; exec "$@"', "sh")
        result = await sandbox.exec(
            (*enter, f"{sandbox.workdir}/{PRIVATE}/bin", *command_argv(spec.test_command)),
            timeout_s=spec.test_timeout_s,
            cwd=sandbox.workdir,
            env={"HPCROLL_REPORTER": home, "PYTHONDONTWRITEBYTECODE": "1"}
            | {key: value.format(module=module) for key, value in self.reporter.env.items()},
            output_bytes=max(self._log_bytes, 4096),
        )
        passed, failed = read_report(await _report(sandbox, f"{home}/{module}.jsonl"))
        log = result.stdout + result.stderr
        return TestRun(passed, failed, result.exit_code, result.timed_out, log)

    def _score(self, spec: RepositorySpec, run: TestRun, patch: bytes, duration_s: float) -> Verdict:
        wanted = frozenset(spec.fail_to_pass)
        fixed = len(wanted & run.passed) / len(wanted)
        if isinstance(spec.pass_to_pass, int):
            kept = min(1.0, len(run.passed - wanted) / spec.pass_to_pass) if spec.pass_to_pass else 1.0
        else:
            guard = frozenset(spec.pass_to_pass)
            kept = len(guard & run.passed) / len(guard) if guard else 1.0
            wanted |= guard
        log = run.log[-self._log_bytes :] if self._log_bytes else b""
        return Verdict(
            reward=1.0 if fixed == 1.0 and kept == 1.0 and not run.timed_out else 0.0,
            components={"fail_to_pass": fixed, "pass_to_pass": kept},
            evaluator=self.name,
            exit_code=run.exit_code,
            tests_passed=tuple(sorted(wanted & run.passed)),
            tests_failed=tuple(sorted(wanted - run.passed)),
            patch_sha256=sha256_hex(patch),
            log_tail=log.decode(errors="replace"),
            duration_s=duration_s,
        )


def read_report(report: bytes) -> tuple[frozenset[str], frozenset[str]]:
    """The ids (passed, not passed) of a reporter's JSON lines.

    One failure of an id outweighs any number of its passes. Lines that are no report, such as the torn
    last line of a killed runner, count for nothing.
    """
    passed: set[str] = set()
    failed: set[str] = set()
    for line in report.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("id"), str):
            (passed if entry.get("passed") is True else failed).add(entry["id"])
    return frozenset(passed - failed), frozenset(failed)


async def _report(sandbox: Sandbox, path: str) -> bytes:
    try:
        return await sandbox.get(path, limit_bytes=_REPORT_BYTES)
    except FileNotFoundError:
        return b""  # the runner never started: a change broke it, and no test passed
    except SandboxError:
        # Past the limit only a forger gets: a suite's own report is a line per test.
        if await sandbox.alive():
            return b""
        raise
