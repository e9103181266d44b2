"""Seeded random trajectories: an imagined agent makes calls, and `hpcroll.trajectory.build` does the rest.

The agent continues exactly, re-renders its past, compacts it, repeats prompts, calls subagents and asks for
titles, each with a probability of its own, so that every way a segment can begin occurs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcroll.contract import (
    Call,
    CallPurpose,
    CallTokens,
    Ids,
    LogprobKind,
    PolicyId,
    RecordedCall,
    Sampling,
    Status,
    StopReason,
    Trajectory,
    TrajectoryRecord,
    Usage,
    Verdict,
)
from hpcroll.trajectory import build

_PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=-1)
_WARM = Sampling(temperature=0.7, top_p=0.95, top_k=-1)
_WORDS = (
    "open the file",
    "and run pytest",
    "then fix",
    "naïve parse",
    "of dates",
    "日付",
    "in src/core.py",
    "line",
)


@dataclass(slots=True)
class _Agent:
    """What the imagined agent remembers: the context it will send next, for each line of calls."""

    rng: random.Random
    rollout_id: str
    attempt: int
    context: list[int]
    start: list[int]
    subagent: list[int] = field(default_factory=list)
    calls: list[RecordedCall] = field(default_factory=list)
    version: int = 0

    def ids(self, low: int, high: int) -> list[int]:
        return [self.rng.randrange(32_000) for _ in range(self.rng.randint(low, high))]

    def ask(self, prompt: list[int], *, purpose: CallPurpose = CallPurpose.MAIN) -> list[int]:
        """Records one call on `prompt` and returns what was sampled."""
        rng, index = self.rng, len(self.calls)
        sampled = self.ids(1, 60)
        self.version += rng.random() < 0.1
        logprobs = np.array([-rng.expovariate(2.0) for _ in sampled], np.float32)
        call = Call(
            call_index=index,
            rollout_id=self.rollout_id,
            attempt=self.attempt,
            dialect="openai_chat",
            model_name="policy",
            endpoint="http://127.0.0.1:8000",
            started_at=1.7e9 + index,
            sampling_effective=_PLAIN if rng.random() < 0.9 else _WARM,
            finish_reason=rng.choice(["stop", "tool_calls", "length"]),
            usage=Usage(prompt_counted=len(prompt), completion_counted=len(sampled)),
            logprob_kind=rng.choice([LogprobKind.RAW, LogprobKind.SAMPLING]),
            policy=PolicyId(
                policy_name="policy",
                lineage="main",
                version_low=self.version,
                version_high=self.version + (rng.random() < 0.1),
            ),
            purpose=purpose,
            messages_base=index - 1 if index else None,
            messages_from=2 * index,
            messages=({"role": "user", "content": self.text()},),
            reply={"role": "assistant", "content": self.text()},
        )
        tokens = CallTokens(np.array(prompt, np.uint32), np.array(sampled, np.uint32), logprobs)
        self.calls.append(RecordedCall(call, tokens))
        return sampled

    def text(self) -> str:
        return " ".join(self.rng.choices(_WORDS, k=self.rng.randint(3, 60)))


def _continue(agent: _Agent) -> None:
    agent.context += agent.ask(agent.context) + agent.ids(1, 40)


def _rerender(agent: _Agent) -> None:
    sampled = agent.ask(agent.context)
    agent.context += [token ^ 1 for token in sampled[-3:]] + agent.ids(1, 40)


def _compact(agent: _Agent) -> None:
    agent.context = agent.start + agent.ids(5, 30)
    _continue(agent)


def _retry(agent: _Agent) -> None:
    samples = [agent.ask(agent.context), agent.ask(agent.context)]
    agent.context += agent.rng.choice(samples) + agent.ids(1, 40)


def _title(agent: _Agent) -> None:
    purpose = agent.rng.choice([CallPurpose.AUXILIARY, CallPurpose.MAIN])
    agent.ask(agent.ids(20, 40), purpose=purpose)


def _delegate(agent: _Agent) -> None:
    agent.subagent = agent.subagent or agent.ids(20, 40)
    for _ in range(agent.rng.randint(1, 3)):
        agent.subagent += agent.ask(agent.subagent) + agent.ids(1, 20)


_MOVES: tuple[tuple[Callable[[_Agent], None], int], ...] = (
    (_continue, 12),
    (_rerender, 2),
    (_compact, 1),
    (_retry, 2),
    (_title, 1),
    (_delegate, 1),
)


def random_calls(
    seed: int, *, turns: int | None = None, rollout_id: str = "0123456789abcdef/0", attempt: int = 1
) -> tuple[RecordedCall, ...]:
    """The recorded calls of one attempt, the same for the same arguments; `turns` is 1 to 12 by default."""
    rng = random.Random(seed)
    start = [rng.randrange(32_000) for _ in range(rng.randint(40, 120))]
    agent = _Agent(rng, rollout_id, attempt, context=list(start), start=start)
    moves, weights = zip(*_MOVES, strict=True)
    for _ in range(turns if turns is not None else rng.randint(1, 12)):
        rng.choices(moves, weights)[0](agent)
    return tuple(agent.calls)


def random_trajectory(
    seed: int,
    *,
    rollout_id: str = "0123456789abcdef/0",
    attempt: int = 1,
    incarnation: str = "worker-a",
    turns: int | None = None,
    group_size: int = 4,
    **fields: Any,
) -> Trajectory:
    """A valid trajectory, the same for the same arguments; `fields` replace fields of its record.

    The group and the sample index follow from the ordinal in `rollout_id` and from `group_size`.
    """
    rng = random.Random(f"record {seed}")
    calls = random_calls(seed, turns=turns, rollout_id=rollout_id, attempt=attempt)
    built = build(calls)
    segment, _, ordinal = rollout_id.partition("/")
    reward = rng.choice([0.0, 1.0, 0.5])
    trained = built.trained_tokens > 0
    values: dict[str, Any] = {
        "run_id": "run",
        "rollout_id": rollout_id,
        "group_id": f"{segment}/g{int(ordinal) // group_size}",
        "group_size": group_size,
        "sample_index": int(ordinal) % group_size,
        "task_id": f"task-{int(ordinal) // group_size}",
        "task_sha256": "0" * 64,
        "attempt": attempt,
        "incarnation": incarnation,
        "handler": "command",
        "harness": "react",
        "harness_version": "1",
        "config_sha256": "1" * 64,
        "status": Status.COMPLETED,
        "stop_reason": StopReason.SUBMITTED,
        "trainable": trained,
        "not_trainable_because": () if trained else ("no token to train on", *built.masked),
        "verdict": Verdict(reward=reward, evaluator="random"),
        "reward": reward,
        "reward_valid": True,
        "segments": built.segments,
        "calls": tuple(recorded.call for recorded in calls),
        "call_spans": built.call_spans,
        "dropped": built.dropped,
        "gaps": built.gaps,
    }
    return Trajectory(TrajectoryRecord(**{**values, **fields}), built.tokens)


def as_ids(*values: int) -> Ids:
    """Token ids as an array, for tests that spell them out."""
    return np.array(values, np.uint32)
