"""Runs a release pair in sandboxes to find its gold patch, and the tests that tell OLD from NEW."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from hpcroll.config import EvaluationConfig
from hpcroll.errors import ConfigError
from hpcroll.evaluators.base import FreshSandbox
from hpcroll.evaluators.commands import tail
from hpcroll.evaluators.pytest_ids import PytestEvaluator
from hpcroll.evaluators.repository import (
    PRIVATE,
    RepositorySpec,
    apply_patch,
    lay_out,
    place_tests,
    read_patch,
)
from hpcroll.evaluators.test_ids import TestRun
from hpcroll.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec

_CLEAR_S = 300.0


class Bench:
    """Fresh sandboxes of one image, without network, for the pair called `name`."""

    def __init__(self, name: str, provider: SandboxProvider, *, image: str | None, runs: int) -> None:
        self._name, self._runs = name, runs
        self._fresh = fresh_sandboxes(provider, name=f"build-{name}", image=image)
        self._evaluator = PytestEvaluator(EvaluationConfig())

    async def complete(self, spec: RepositorySpec, gold: Path) -> RepositorySpec:
        """`spec` with its gold patch and test ids, `gold` being an archive of the tree that solves it.

        Raises `ConfigError` where no test fails before the patch and passes after it, every time.
        """
        patch = await self._gold_patch(spec, gold)
        before = [await self._run(spec, b"") for _ in range(self._runs)]
        after = [await self._run(spec, patch) for _ in range(self._runs)]
        ever_before = frozenset[str]().union(*(run.passed for run in before))
        always_before = before[0].passed.intersection(*(run.passed for run in before))
        always_after = after[0].passed.intersection(*(run.passed for run in after))
        fail_to_pass = always_after - ever_before
        if not fail_to_pass:
            raise ConfigError(
                f"{self._name}: no test fails before the change and passes after it "
                f"({len(always_before)} pass before, {len(always_after)} after); choose another pair. "
                "The output of the tests ends: "
                f"{after[-1].log[-1500:].decode(errors='replace')}"
            )
        found = {
            "gold_patch": patch.decode(),
            "fail_to_pass": tuple(sorted(fail_to_pass)),
            "pass_to_pass": tuple(sorted(always_after & always_before)),
        }
        return spec.model_copy(update=found)

    async def _gold_patch(self, spec: RepositorySpec, gold: Path) -> bytes:
        """What an agent would leave whose work tree is `gold`."""
        clear = ("find", ".", "-mindepth", "1", "-maxdepth", "1", "!", "-name", ".git")
        async with self._fresh() as sandbox:
            await lay_out(spec, sandbox)
            argv = (*clear, "!", "-name", PRIVATE, "-exec", "rm", "-rf", "{}", "+")
            result = await sandbox.exec(argv, timeout_s=_CLEAR_S, cwd=sandbox.workdir)
            if result.exit_code != 0:
                raise ConfigError(f"{self._name}: the old tree cannot be removed: {tail(result)}")
            await sandbox.put_tree(gold, sandbox.workdir)
            left = await read_patch(spec, sandbox)
        if not left.get("patch"):
            reason = left.get("patch_error", b"the library is the same in both releases").decode()
            raise ConfigError(f"{self._name}: no gold patch: {reason}")
        return left["patch"]

    async def _run(self, spec: RepositorySpec, patch: bytes) -> TestRun:
        async with self._fresh() as sandbox:
            await lay_out(spec, sandbox)
            reason = await apply_patch(spec, sandbox, patch)
            if reason is not None:
                raise ConfigError(f"{self._name}: the gold patch does not apply to the old tree: {reason}")
            await place_tests(spec, sandbox)
            return await self._evaluator.run_tests(spec, sandbox)


def fresh_sandboxes(provider: SandboxProvider, *, name: str, image: str | None) -> FreshSandbox:
    """Starts one new sandbox of `image` per call, named after `name`; it is stopped at the end."""

    @asynccontextmanager
    async def fresh() -> AsyncIterator[Sandbox]:
        sandbox = await provider.start(SandboxSpec(name=f"{name}-{secrets.token_hex(4)}", image=image))
        try:
            yield sandbox
        finally:
            await sandbox.stop()

    return fresh
