"""The main job with an agent program: a small repository, a network-less sandbox, a scripted policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcroll.api import Run
from hpcroll.contract import RecordedCall, Status, StopReason, Task, Trajectory
from hpcroll.fs import RunPaths
from hpcroll.gateway import read_journal
from hpcroll.shards import verify_run
from hpcroll.testing import check
from hpcroll.testing.policy_server import Behaviour, Script
from hpcroll.testing.tiny_tokenizer import write_tokenizer
from tests.agents import FIX, LAST_WORDS, PROMPT, Agent
from tests.capabilities import AGENTS as AGENT_PROGRAMS
from tests.capabilities import IMAGES
from tests.round_trip import Told, assert_same, told

_CALC = "def add(a, b):\n    return a - b\n"
_TEST = """\
import unittest

import calc


class AddTest(unittest.TestCase):
    def test_add(self):
        self.assertEqual(calc.add(2, 3), 5)
"""
_HIDDEN = f"""{_TEST}
    def test_words_came_through(self):
        with open(calc.__file__, encoding="utf-8") as file:
            self.assertIn({FIX!r}, file.read())
"""


def repository_task() -> Task:
    """A git repository whose one function is wrong; a hidden test reads the agent's very characters."""
    return Task(
        task_id="calc",
        handler="swe",
        prompt=PROMPT,
        spec={
            "repo": {"calc.py": _CALC, "test_calc.py": _TEST},
            "tests": {"test_calc.py": _HIDDEN},
            "tests_paths": ["test_calc.py"],
            "test_command": "python -m unittest test_calc",
            "test_timeout_s": 60,
            "evaluator": "unittest",
            "fail_to_pass": ["test_calc.AddTest.test_add", "test_calc.AddTest.test_words_came_through"],
        },
    )


@dataclass(frozen=True)
class Done:
    """One rollout of an agent: its committed record, the calls in the journal, what the server told."""

    run: Run
    trajectory: Trajectory
    calls: Sequence[RecordedCall]
    told: Told

    @property
    def requests(self) -> list[str]:
        """What each call's request added to the conversation, as text."""
        return [str(recorded.call.messages) for recorded in self.calls]


def roll_out(
    agent: Agent,
    behaviour: Behaviour,
    root: Path,
    serve_scripts: Callable[..., str],
    *,
    mode: str = "chat",
    retention: str | None = None,
    context_tokens: int = 200_000,
) -> Done:
    """Runs one rollout of the task on a local worker, to its committed record.

    `retention` is `thinking_retention` of mode `tokens`.
    """
    log = root / "sampled.jsonl"
    url = serve_scripts(
        [Script(prompt=PROMPT, behaviours=(behaviour,))],
        log=log,
        options=["--template", "qwen3", "--context-tokens", str(context_tokens), "--version", "3"],
    )
    model: dict[str, Any] = {"endpoints": [url], "context_tokens": context_tokens, "mode": mode}
    if mode == "tokens":
        model["tokens"] = {
            "tokenizer": str(write_tokenizer(root / "tokenizer")),
            "renderer": "qwen3",
            "thinking_retention": retention,
            "scale_out": True,
        }
    config = {
        "model": model,
        "sandbox": {
            "name": "apptainer",
            "image": str(IMAGES / "base"),
            "scratch": os.environ.get("TMPDIR", "/tmp"),
        },
        "harness": {
            "name": agent.name,
            "options": {"store": str(AGENT_PROGRAMS)},
            "max_turns": 100,
        },
        "stages": {"run": {"width": 1, "timeout_s": 900}},
        "launch": {"launcher": "local", "idle_s": 0},
    }
    run = Run.create(root / "run", config=config)
    run.submit([repository_task()], samples=1, key="agent")
    run.launch(workers=1, wait=True)
    [result] = run.results("agent", wait=False)
    trajectory = result.trajectory()
    record = trajectory.record
    journal = RunPaths(run.path).journal_file(record.incarnation)
    calls = list(read_journal(journal, rollout_id=record.rollout_id, attempt=record.attempt))
    return Done(run, trajectory, calls, told(log, f"{record.rollout_id}.{record.attempt}"))


def assert_solved(agent: Agent, done: Done, *, refused: int = 0) -> None:
    """The task is solved, the record is sound, and it holds what the server sampled, id for id.

    `refused` calls were too long for the context.
    """
    record = done.trajectory.record
    assert (record.status, record.stop_reason) == (Status.COMPLETED, StopReason.EXITED), record.failure
    assert record.reward == 1.0, record.verdict
    assert check(done.trajectory, done.calls) == ()
    report = verify_run(done.run.path)
    assert report.ok, report
    assert_same(done.told, done.trajectory, refused=refused)
    assert len(record.calls) >= 8
    errors = [call.error for call in record.calls if call.error]
    assert len(errors) == refused, errors
    if agent.answers and not refused:  # Pi prints nothing once it was refused a call
        assert LAST_WORDS in (record.answer or "")
