"""Imagined sessions whose truth is known: first what the agents do, then the calls that come of it.

Token ids are unique unless one context repeats another's, so that every relation between calls is the
one that was meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from hpcroll.contract import (
    Call,
    CallPurpose,
    CallTokens,
    LogprobKind,
    PolicyId,
    RecordedCall,
    Sampling,
    SegmentRole,
    SegmentStart,
    Trajectory,
    Usage,
)
from hpcroll.testing.trajectories import random_trajectory
from hpcroll.trajectory import build

ROLLOUT = "0123456789abcdef/0"
PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=-1)


@dataclass
class Truth:
    """Where one call's samples belong. Without `after`, it begins a segment: with `began`, at the first
    `fork` tokens of the segment of call `source`."""

    after: int | None = None
    """The call that it goes on from, in one segment."""
    began: SegmentStart = SegmentStart.START
    source: int | None = None
    fork: int = 0
    role: SegmentRole = SegmentRole.MAIN
    dropped: bool = False
    """Stands in no segment."""


@dataclass
class Thread:
    """One agent: what it will send next, and the last call that it goes on from."""

    role: SegmentRole
    system: list[int]
    context: list[int]
    last: int | None = None
    next_truth: Truth | None = None
    """How the next call begins, where it does not go on from `last`."""
    chain: list[int] = field(default_factory=list)
    """Calls that go on from each other exactly, up to `last`."""


class Session:
    """The calls of an imagined session and the truth about each."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.calls: list[RecordedCall] = []
        self.truths: dict[int, Truth] = {}
        self._next_id = 0
        self._version = 1
        system = self.fresh(20)
        self.header = system[:3]
        self.main = Thread(SegmentRole.MAIN, system, [*system, *self.fresh(5)])
        self.subagents: list[Thread] = []
        self.step(self.main)

    def fresh(self, count: int) -> list[int]:
        self._next_id += count
        return list(range(self._next_id - count, self._next_id))

    def some(self) -> list[int]:
        return self.fresh(self.rng.randint(1, 6))

    def call(
        self,
        prompt: Sequence[int],
        truth: Truth,
        *,
        purpose: CallPurpose = CallPurpose.MAIN,
        error: str | None = None,
        lost: bool = False,
        samples: int | None = None,
        **fields: Any,
    ) -> tuple[int, list[int]]:
        """Records a call: its index and what was sampled."""
        index = len(self.calls)
        sampled = self.fresh(self.rng.randint(1, 6) if samples is None else samples)
        low = self._version
        self._version += self.rng.random() < 0.2
        record = Call(
            call_index=index,
            rollout_id=ROLLOUT,
            attempt=1,
            dialect="d",
            model_name="m",
            endpoint="",
            started_at=0.0,
            sampling_effective=PLAIN,
            logprob_kind=LogprobKind.RAW,
            finish_reason=None if error else "stop",
            policy=PolicyId(policy_name="p", lineage="main", version_low=low, version_high=self._version),
            purpose=purpose,
            usage=Usage(prompt_counted=len(prompt), completion_counted=len(sampled)),
            error=error,
            **fields,
        )
        logprobs = np.full(len(sampled), np.nan if lost else -0.5, np.float32)
        tokens = CallTokens(np.array(prompt, np.uint32), np.array(sampled, np.uint32), logprobs)
        self.calls.append(RecordedCall(record, tokens))
        if sampled:
            self.truths[index] = truth
        return index, sampled

    def begin(self, thread: Thread) -> Truth:
        """The truth about the thread's next call."""
        truth, thread.next_truth = thread.next_truth, None
        return truth or Truth(after=thread.last, role=thread.role)

    def went_on(self, thread: Thread, index: int, sampled: Sequence[int]) -> None:
        """The thread goes on from call `index`, after a tool result."""
        exact = self.truths[index].after is not None
        thread.chain = [*thread.chain, index] if exact else [index]
        thread.last = index
        thread.context = [*thread.context, *sampled, *self.some()]

    # what an agent may do

    def step(self, thread: Thread) -> None:
        self.went_on(thread, *self.call(thread.context, self.begin(thread)))

    def rerender(self, thread: Thread) -> None:
        """The reply comes back in other tokens, from any of its own on."""
        prompt = list(thread.context)
        index, sampled = self.call(prompt, self.begin(thread))
        kept = self.rng.randrange(len(sampled))
        self.went_on(thread, index, [])
        thread.context = [*prompt, *sampled[:kept], *self.some(), *self.some()]
        thread.next_truth = Truth(
            began=SegmentStart.CONTEXT_REWRITTEN, source=index, fork=len(prompt) + kept, role=thread.role
        )
        self.step(thread)

    def retry(self, thread: Thread) -> None:
        """The same prompt two or three times; the agent goes on from one of the replies."""
        first = self.begin(thread)
        count = self.rng.randint(2, 3)
        used = self.rng.randrange(count)
        at = len(self.calls)
        others = Truth(began=SegmentStart.RETRY, source=at + used, fork=len(thread.context), role=thread.role)
        replies = [self.call(thread.context, first if n == used else others) for n in range(count)]
        self.went_on(thread, *replies[used])
        self.step(thread)

    def cut(self, thread: Thread) -> None:
        """The agent hangs up in the middle of a reply and asks again."""
        truth = self.begin(thread)
        again = len(self.calls) + 1
        others = Truth(began=SegmentStart.RETRY, source=again, fork=len(thread.context), role=thread.role)
        self.call(thread.context, others, error="the agent went away")
        self.went_on(thread, *self.call(thread.context, truth))

    def stall(self, thread: Thread) -> None:
        """A reply that broke off; the agent goes on with a hint in its place."""
        self.step(thread)
        aside = Truth(
            began=SegmentStart.BRANCH,
            source=len(self.calls) + 1,
            fork=len(thread.context),
            role=SegmentRole.AUXILIARY,
        )
        self.call(thread.context, aside, error="stalled")
        thread.context = [*thread.context, *self.some()]
        self.step(thread)

    def fail(self, thread: Thread) -> None:
        """A call without a single token."""
        del thread
        self.call(self.some(), Truth(), error="503", samples=0)

    def silent(self, thread: Thread) -> None:
        """A reply of no tokens."""
        self.call(thread.context, Truth(), samples=0)

    def lose(self, thread: Thread) -> None:
        """A reply whose log-probabilities did not come."""
        index, sampled = self.call(thread.context, Truth(dropped=True), lost=True)
        del index
        thread.context = [*thread.context, *sampled, *self.some()]
        self.step(thread)

    def aside(self, thread: Thread) -> None:
        """A question about the whole context that nothing goes on from, declared or not."""
        self.step(thread)
        purpose = self.rng.choice([CallPurpose.MAIN, CallPurpose.AUXILIARY])
        truth = Truth(
            began=SegmentStart.BRANCH,
            source=thread.last,
            fork=len(thread.context),
            role=SegmentRole.AUXILIARY,
        )
        if self.rng.random() < 0.5:
            self.call([*thread.context, *self.some()], truth, purpose=purpose)
            thread.context = [*thread.context, *self.some()]
            self.step(thread)
        else:
            # The agent's own call is under way when the question begins.
            shared = list(thread.context)
            thread.context = [*thread.context, *self.some()]
            self.step(thread)
            self.call([*shared, *self.some()], truth, purpose=purpose)
        self.step(thread)

    def title(self, thread: Thread) -> None:
        del thread
        purpose = self.rng.choice([CallPurpose.MAIN, CallPurpose.AUXILIARY])
        truth = Truth(began=SegmentStart.SUBAGENT, role=SegmentRole.AUXILIARY)
        self.call([*self.header, *self.fresh(12)], truth, purpose=purpose)

    def compact(self, thread: Thread) -> None:
        """The history gives way to a summary, which was asked for: declared, quoted by the next context,
        or neither."""
        how = self.rng.choice(["declared", "quoted", "neither", "unasked"])
        text = f"Summary {len(self.calls)}: the bug is in the parser, and the fix is half done."
        messages: tuple[Any, ...] = ()
        self.step(thread)
        if how == "neither":
            self.step(thread)
        elif how != "unasked":
            aside = Truth(
                began=SegmentStart.BRANCH,
                source=thread.last,
                fork=len(thread.context) - self._after(thread),
                role=SegmentRole.AUXILIARY,
            )
            purpose = CallPurpose.AUXILIARY if how == "declared" else CallPurpose.MAIN
            prompt = [*thread.context, *self.some()]
            self.call(prompt, aside, purpose=purpose, reply={"role": "assistant", "content": text})
            if how == "quoted":
                messages = ({"role": "user", "content": f"Before: {text}"},)
        thread.context = [*thread.system, *self.fresh(5)]
        truth = Truth(
            began=SegmentStart.CONTEXT_REWRITTEN,
            source=self._oldest(thread),
            fork=len(thread.system),
            role=thread.role,
        )
        self.went_on(thread, *self.call(thread.context, truth, messages=messages))
        self.step(thread)

    def _after(self, thread: Thread) -> int:
        """Tokens of the thread's context that no call has seen yet."""
        last = self.calls[thread.last or 0].tokens
        return len(thread.context) - last.prompt_length - len(last.sampled_ids)

    def _oldest(self, thread: Thread) -> int:
        """The first call whose prompt begins with the thread's system prompt."""
        size = len(thread.system)
        return next(
            index
            for index in self.truths
            if not self.truths[index].dropped
            and self.calls[index].call.purpose is CallPurpose.MAIN
            and self.calls[index].tokens.prompt_ids[:size].tolist() == thread.system
        )

    def rewind(self, thread: Thread) -> None:
        """The agent goes back to an earlier reply and on from there."""
        self.step(thread)
        self.step(thread)
        back, abandoned = thread.chain[-2:]
        tokens = self.calls[back].tokens
        size = tokens.prompt_length + len(tokens.sampled_ids)
        self.truths[abandoned] = Truth(
            began=SegmentStart.BRANCH, source=back, fork=size, role=SegmentRole.AUXILIARY
        )
        thread.context = [*thread.context[:size], *self.some()]
        thread.last, thread.chain = back, thread.chain[:-1]
        self.step(thread)
        self.step(thread)

    def spawn(self, thread: Thread) -> None:
        """A subagent with a prompt of its own, or with the opening of the main one's."""
        del thread
        if self.rng.random() < 0.5:
            system = [*self.header, *self.fresh(17)]
            truth = Truth(began=SegmentStart.SUBAGENT, role=SegmentRole.SUBAGENT)
        else:
            system = self.main.system
            truth = Truth(
                began=SegmentStart.SUBAGENT,
                source=self._oldest(self.main),
                fork=len(system),
                role=SegmentRole.SUBAGENT,
            )
        subagent = Thread(SegmentRole.SUBAGENT, system, [*system, *self.fresh(5)], next_truth=truth)
        self.subagents.append(subagent)
        self.step(subagent)
        self.step(self.main)
        self.step(subagent)


MOVES: dict[str, Callable[[Session, Thread], None]] = {
    "step": Session.step,
    "rerender": Session.rerender,
    "retry": Session.retry,
    "cut": Session.cut,
    "stall": Session.stall,
    "fail": Session.fail,
    "silent": Session.silent,
    "lose": Session.lose,
    "aside": Session.aside,
    "title": Session.title,
    "compact": Session.compact,
    "rewind": Session.rewind,
    "spawn": Session.spawn,
}

ON_MAIN_ONLY = frozenset({"compact"})
"""A subagent's compacted context cannot be told from another subagent's where both share an opening."""


def imagine(seed: int, moves: Sequence[tuple[str, int]]) -> Session:
    """The session in which the main agent (0) or one of the subagents makes each of `moves` in turn."""
    session = Session(seed)
    for name, who in moves:
        threads = [session.main, *session.subagents]
        thread = session.main if name in ON_MAIN_ONLY else threads[who % len(threads)]
        MOVES[name](session, thread)
    session.step(session.main)
    session.step(session.main)
    return session


def trajectory_of(session: Session, **fields: Any) -> Trajectory:
    """The session as a valid trajectory; `fields` replace fields of its record."""
    built = build(session.calls)
    record = random_trajectory(0).record.model_copy(
        update={
            "rollout_id": ROLLOUT,
            "trainable": True,
            "not_trainable_because": (),
            "segments": built.segments,
            "calls": tuple(recorded.call for recorded in session.calls),
            "call_spans": built.call_spans,
            "dropped": built.dropped,
            "gaps": built.gaps,
            **fields,
        }
    )
    return Trajectory(record, built.tokens)
