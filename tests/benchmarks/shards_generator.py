"""A seeded set of imagined trajectories that compress, repeat and branch as those of coding agents do.

Groups of 8 share a system prompt with every group of their harness, the task's text with their siblings,
and a repository whose files they read again and again. tests/unit/test_shards_generator.py holds the set to
the figures that docs/benchmarks.md gives for it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from hpcroll.contract import (
    Action,
    Call,
    CallSpan,
    ContextSpan,
    Ids,
    Latency,
    LogprobKind,
    Parent,
    PolicyId,
    PolicyRun,
    Resources,
    RolloutRef,
    Sampling,
    Segment,
    SegmentStart,
    SegmentTokens,
    StageTiming,
    Status,
    StopReason,
    Timing,
    Trajectory,
    TrajectoryRecord,
    Usage,
    Verdict,
    group_id,
)
from tests.benchmarks.shards_agent import Conversation, Line, Request, sampled_logprobs
from tests.benchmarks.shards_corpus import corpus
from tests.benchmarks.shards_repository import Repository

GROUP_SIZE = 8
SEED = 1
SHORTEST, LONGEST = 4_000, 60_000
_SEGMENT = "5eed5eed5eed5eed"
_HARNESSES = ("claude_code", "codex", "opencode", "qwen_code")
_PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=-1)


@dataclass(frozen=True)
class Setting:
    """Where a group works: its repository, its head, and how its siblings like to put things."""

    group: int
    repository: Repository
    head: list[tuple[str, Ids]]
    habits: list[Ids]
    tokens: int
    """About what a sibling takes."""


def trajectories(groups: int, *, seed: int = SEED, incarnation: str = "w0") -> Iterator[Trajectory]:
    """`groups` groups of 8 trajectories, sorted by group; the same for the same arguments and Python."""
    for group in range(groups):
        yield from group_of(group, seed=seed, incarnation=incarnation)


def group_of(group: int, *, seed: int = SEED, incarnation: str = "w0") -> list[Trajectory]:
    """The trajectories of one group."""
    setting = _setting(group, seed)
    return [_trajectory(setting, sample, seed, incarnation) for sample in range(GROUP_SIZE)]


def _setting(group: int, seed: int) -> Setting:
    rng = random.Random(f"group {seed} {group}")
    repository = Repository(corpus(), f"repository {seed} {group}")
    harness = _HARNESSES[group % len(_HARNESSES)]
    task = repository.prose(rng, rng.randint(150, 900))
    habits = [repository.prose(rng, rng.randint(8, 30)) for _ in range(40)]
    tokens = int(np.exp(rng.uniform(np.log(SHORTEST * 1.3), np.log(LONGEST * 0.95))))
    return Setting(group, repository, [("system", _system(harness, seed)), ("user", task)], habits, tokens)


@cache
def _system(harness: str, seed: int) -> Ids:
    rng = random.Random(f"system {seed} {harness}")
    return Repository(corpus(), f"system {seed} {harness}").prose(rng, rng.randint(1200, 2400))


def _trajectory(setting: Setting, sample: int, seed: int, incarnation: str) -> Trajectory:
    name = f"sample {seed} {setting.group} {sample}"
    rng = random.Random(name)
    numbers = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
    tokens = int(min(LONGEST * 0.95, max(SHORTEST * 1.2, setting.tokens * rng.lognormvariate(0, 0.3))))
    talk = Conversation(setting.repository, rng, head=setting.head, habits=setting.habits, tokens=tokens)
    ref = RolloutRef(_SEGMENT, setting.group * GROUP_SIZE + sample)
    version = setting.group // 16 + (rng.random() < 0.2)
    arrays = tuple(_arrays(line, numbers) for line in talk.lines)
    record = _record(setting, ref, talk, rng, version=version, incarnation=incarnation)
    return Trajectory(record, arrays)


def _arrays(line: Line, numbers: np.random.Generator) -> SegmentTokens:
    sampled = np.zeros(line.size, np.uint8)
    for _, start, length in line.spans:
        sampled[start : start + length] = 1
    logprobs = np.full(line.size, np.nan, np.float32)
    logprobs[sampled == 1] = sampled_logprobs(numbers, int(sampled.sum()))
    return SegmentTokens(line.ids(), sampled, sampled.copy(), logprobs)


def _record(
    setting: Setting,
    ref: RolloutRef,
    talk: Conversation,
    rng: random.Random,
    *,
    version: int,
    incarnation: str,
) -> TrajectoryRecord:
    harness = _HARNESSES[setting.group % len(_HARNESSES)]
    reward = float(rng.random() < 0.15 + 0.7 * (setting.group % 7) / 6)
    began = 1.79e9 + 40 * ref.ordinal + rng.random()
    segments = tuple(
        _segment(index, line, version, len(talk.lines), setting) for index, line in enumerate(talk.lines)
    )
    return TrajectoryRecord(
        run_id="bench",
        rollout_id=ref.rollout_id,
        group_id=group_id(ref, GROUP_SIZE),
        group_size=GROUP_SIZE,
        sample_index=ref.ordinal % GROUP_SIZE,
        task_id=f"repository-{setting.group}",
        task_sha256=_sha256(f"task {setting.group}"),
        dataset="bench",
        attempt=1,
        incarnation=incarnation,
        handler="swe",
        harness=harness,
        harness_version="1.0.0",
        image_sha256=_sha256(f"image {setting.group}"),
        config_sha256=_sha256("config"),
        status=Status.COMPLETED,
        stop_reason=StopReason.EXITED,
        trainable=True,
        verdict=Verdict(reward=reward, evaluator="pytest", exit_code=0, duration_s=rng.uniform(2, 60)),
        reward=reward,
        reward_valid=True,
        segments=segments,
        calls=tuple(
            _call(index, request, ref, rng, version, began) for index, request in enumerate(talk.requests)
        ),
        call_spans=tuple(
            CallSpan(call_index=call, segment_index=index, start=start, length=length)
            for index, line in enumerate(talk.lines)
            for call, start, length in line.spans
        ),
        actions=tuple(_actions(talk, rng)),
        answer=talk.requests[-1].reply["content"],
        timing=_timing(began, rng),
        resources=Resources(
            node=f"n{ref.ordinal % 5}",
            slurm_job=str(4711 + ref.ordinal // 160),
            cpu_s=rng.uniform(5, 300),
            peak_memory_bytes=rng.randrange(1 << 27, 1 << 31),
            written_bytes=rng.randrange(1 << 24),
        ),
        model_name="policy",
        tokenizer_sha256=_sha256("tokenizer"),
    )


def _segment(index: int, line: Line, version: int, count: int, setting: Setting) -> Segment:
    shared = sum(len(ids) for _, ids in setting.head)
    return Segment(
        segment_index=index,
        parent=Parent(segment_index=0, length=shared) if index else None,
        began=SegmentStart.CONTEXT_REWRITTEN if index else SegmentStart.START,
        length=line.size,
        weight=1 / count,
        policy_runs=tuple(
            PolicyRun(
                start=start,
                length=length,
                policy_name="policy",
                lineage="main",
                version_low=version,
                version_high=version,
            )
            for _, start, length in line.spans
        ),
        context_spans=tuple(
            ContextSpan(start=start, length=length, role=role) for start, length, role in line.context
        ),
    )


def _call(
    index: int, request: Request, ref: RolloutRef, rng: random.Random, version: int, began: float
) -> Call:
    return Call(
        call_index=index,
        rollout_id=ref.rollout_id,
        attempt=1,
        dialect="openai_chat",
        model_name="policy",
        endpoint=f"http://10.0.0.{rng.randrange(4)}:8000",
        started_at=began + 20 * index + rng.random(),
        latency=Latency(
            queue_s=rng.expovariate(50),
            first_token_s=rng.expovariate(4),
            total_s=request.reply_tokens * rng.uniform(0.01, 0.02),
        ),
        sampling_asked=Sampling(temperature=1.0),
        sampling_effective=_PLAIN,
        finish_reason="tool_calls" if "tool_calls" in request.reply else "stop",
        usage=Usage(
            prompt_reported=request.prompt_tokens,
            completion_reported=request.reply_tokens,
            prompt_counted=request.prompt_tokens,
            completion_counted=request.reply_tokens,
        ),
        logprob_kind=LogprobKind.SAMPLING,
        policy=PolicyId(policy_name="policy", lineage="main", version_low=version, version_high=version),
        messages_base=request.base,
        messages_from=request.messages_from,
        messages=tuple(request.messages),
        reply=request.reply,
        tools_sha256=_sha256("tools"),
    )


def _actions(talk: Conversation, rng: random.Random) -> Iterator[Action]:
    started_s = 0.0
    for index, (name, arguments, size) in enumerate(talk.outputs):
        started_s += rng.uniform(1, 20)
        yield Action(
            call_index=index,
            name=name,
            argument_sha256=_sha256(arguments),
            started_s=started_s,
            duration_s=rng.expovariate(3),
            exit_code=int(rng.random() < 0.1),
            output_bytes=size,
        )


def _timing(began: float, rng: random.Random) -> Timing:
    spans: dict[str, Any] = {
        "init": StageTiming(started_at=began - 5, duration_s=rng.uniform(0.1, 4)),
        "run": StageTiming(started_at=began, duration_s=rng.uniform(60, 900)),
        "eval": StageTiming(started_at=began + 900, duration_s=rng.uniform(2, 60)),
    }
    return Timing(submitted_at=1.79e9, claimed_at=began - 6, **spans)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
