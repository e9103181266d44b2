"""Answers compared with an expected one, in a process of their own: what math and quantity share.

An answer is hostile input to a computer algebra system: it may never return, or take all memory. The
comparison therefore runs in one long-lived child process, which is killed and replaced when it overruns.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

from pydantic import Field

from hpcroll.config import EvaluationConfig, Strict
from hpcroll.contract import Task, Verdict
from hpcroll.errors import EvaluatorError
from hpcroll.evaluators.base import Artefacts, FreshSandbox

_MEMORY_BYTES = 4 << 30
_START_S = 120.0
_CALLS_PER_PROCESS = 2000

Match = tuple[bool, str]
"""Whether the answer is right, and what it was read as or why it is wrong."""


class AnswerSpec(Strict):
    """An expected answer."""

    answer: str = Field(min_length=1)
    """The expected answer."""
    compare_timeout_s: float = Field(default=10.0, gt=0)
    """Longest that the comparison may take, in seconds; past it the answer counts as wrong."""
    answer_bytes: int = Field(default=20_000, ge=1)
    """Longest answer that is read, in bytes; a longer one counts as wrong."""


class AnswerEvaluator:
    """Reward 1.0 for a right answer, 0.0 for a wrong one or none; needs no sandbox.

    Subclasses name the comparison, a function at the top of a module, and the packages that it imports.
    """

    Spec: ClassVar[type[Strict]] = AnswerSpec
    name: ClassVar[str]
    compare: ClassVar[Callable[..., Match]]
    packages: ClassVar[tuple[str, ...]]

    def __init__(self, config: EvaluationConfig) -> None:
        self._log_bytes = config.log_bytes
        self._process = ComparisonProcess(self.packages)

    async def evaluate(self, task: Task, artefacts: Artefacts, fresh: FreshSandbox) -> Verdict:
        """The verdict on artefact `answer`; raises `EvaluatorError` where no comparison can run."""
        started_s = time.monotonic()
        spec = cast(AnswerSpec, self.Spec.model_validate(task.spec))
        right, reason = await self._match(spec, artefacts.get("answer"))
        return Verdict(
            reward=1.0 if right else 0.0,
            evaluator=self.name,
            log_tail=reason[-self._log_bytes :] if self._log_bytes else "",
            duration_s=time.monotonic() - started_s,
        )

    async def _match(self, spec: AnswerSpec, answer: bytes | None) -> Match:
        if answer is None:
            return False, "the agent submitted no answer"
        if len(answer) > spec.answer_bytes:
            return False, f"the answer has {len(answer)} bytes, more than the limit of {spec.answer_bytes}"
        text = answer.decode(errors="replace")
        try:
            return await self._process.call(type(self).compare, spec, text, timeout_s=spec.compare_timeout_s)
        except TimeoutError:
            return False, f"the comparison took longer than {spec.compare_timeout_s:g} s"


class ComparisonProcess:
    """One child process that compares, started at the first call and replaced whenever it dies."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = tuple(packages)
        self._pool: Any = None

    async def call(self, compare: Callable[..., Match], /, *arguments: Any, timeout_s: float) -> Match:
        """`compare(*arguments)`; raises `TimeoutError` past `timeout_s` seconds of computing.

        A comparison that raises is no match. Raises `EvaluatorError` where the process cannot start, or
        where it dies twice: a first death may be a node's doing.
        """
        pool = self._started()
        failure: BaseException | None = None
        for _ in range(2):
            # The imports take seconds on a busy node, and are not the answer's fault.
            await asyncio.wrap_future(pool.schedule(_import, args=[self._packages], timeout=_START_S))
            future = pool.schedule(_guarded, args=[compare, arguments], timeout=timeout_s)
            try:
                match: Match = await asyncio.wrap_future(future)
                return match
            except TimeoutError:
                raise
            except OSError as error:  # pebble's ProcessExpired is one
                failure = error
        raise EvaluatorError(f"{compare.__name__} died twice: {failure}") from failure

    def _started(self) -> Any:
        if self._pool is None:
            require(self._packages)
            from pebble import ProcessPool

            # spawn: a fork of a worker would copy its threads' locks in whatever state they are.
            self._pool = ProcessPool(
                max_workers=1,
                max_tasks=_CALLS_PER_PROCESS,
                initializer=_limit_memory,
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool


def require(packages: Sequence[str]) -> None:
    """Raises `EvaluatorError` where one of the packages of the extra `verifiers` is absent."""
    missing = [name for name in (*packages, "pebble") if importlib.util.find_spec(name) is None]
    if missing:
        raise EvaluatorError(f"{', '.join(missing)} not installed: pip install 'hpcroll[verifiers]'")


def _guarded(compare: Callable[..., Match], arguments: Sequence[Any]) -> Match:
    try:
        return compare(*arguments)
    except Exception as error:  # noqa: BLE001 - hostile text makes a parser fail in any way there is
        return False, f"the comparison failed: {type(error).__name__}: {error}"


def _import(packages: Sequence[str]) -> None:
    for name in packages:
        importlib.import_module(name)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
