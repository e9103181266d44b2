"""What an evaluator is: artefacts of an agent in, a verdict out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import ClassVar, Protocol

from hpcroll.config import EvaluationConfig, Strict
from hpcroll.contract import Task, Verdict
from hpcroll.sandboxes.base import Sandbox

Artefacts = Mapping[str, bytes]
"""What an agent left, by name: `answer`, `patch`, ... Small enough to travel between legs."""

FreshSandbox = Callable[[], AbstractAsyncContextManager[Sandbox]]
"""Starts a sandbox of the task's image that the agent never touched; stops it at the end."""


class Evaluator(Protocol):
    """Scores the artefacts of one rollout.

    Raises `EvaluatorError` where no verdict can be reached through no fault of the agent; whatever the
    agent's artefacts do to the tests is a verdict, not an error.
    """

    Spec: ClassVar[type[Strict]]
    """Model of what the evaluator needs of the task."""

    def __init__(self, config: EvaluationConfig) -> None: ...

    async def evaluate(self, task: Task, artefacts: Artefacts, fresh: FreshSandbox) -> Verdict:
        """The verdict; the caller stops it at the deadline by cancellation."""
        ...
