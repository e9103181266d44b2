"""hpcroll's own task families keep the contract of handlers."""

from __future__ import annotations

from collections.abc import Sequence

from hpcroll.contract import Task
from hpcroll.evaluators.repository import RepositorySpec
from hpcroll.handlers.base import Handler
from hpcroll.handlers.code import CodeHandler
from hpcroll.handlers.command import CommandHandler
from hpcroll.handlers.math import MathHandler
from hpcroll.handlers.stem import StemHandler
from hpcroll.handlers.swe import SweHandler
from hpcroll.testing.demo import demo_tasks
from hpcroll.testing.handler_suite import HandlerContract, evaluation

_MATH, _STEM = MathHandler(evaluation()), StemHandler(evaluation())  # each starts one process, once


class TestMath(HandlerContract):
    def make(self) -> Handler:
        return _MATH

    def tasks(self) -> Sequence[Task]:
        return demo_tasks(["math"])


class TestStem(HandlerContract):
    def make(self) -> Handler:
        return _STEM

    def tasks(self) -> Sequence[Task]:
        return demo_tasks(["stem"])


class TestCode(HandlerContract):
    def make(self) -> Handler:
        return CodeHandler(evaluation())

    def tasks(self) -> Sequence[Task]:
        return demo_tasks(["code"])[:2]

    def secrets(self, task: Task) -> Sequence[str]:
        return [str(task.spec["tests"]), str(task.spec["solution"])]


class TestSwe(HandlerContract):
    def make(self) -> Handler:
        return SweHandler(evaluation())

    def tasks(self) -> Sequence[Task]:
        return demo_tasks(["swe"])[:1]

    def secrets(self, task: Task) -> Sequence[str]:
        spec = RepositorySpec.model_validate(task.spec)
        assert isinstance(spec.tests, dict)
        return [text for text in spec.tests.values() if text] + [str(spec.gold_patch)]


class TestCommand(HandlerContract):
    def make(self) -> Handler:
        return CommandHandler(evaluation())

    def tasks(self) -> Sequence[Task]:
        return demo_tasks(["command"])

    def secrets(self, task: Task) -> Sequence[str]:
        verifier = task.spec.get("verifier", {})
        assert isinstance(verifier, dict)
        return [str(text) for text in verifier.values()] + [str(task.spec["verify"])]
