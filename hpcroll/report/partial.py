"""Trajectories of attempts that have no result: still running, stopped, or killed. The journal has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcroll.contract import RecordedCall, RolloutRef, Stage, Status, StopReason, Trajectory, TrajectoryRecord
from hpcroll.errors import ConfigError, CorruptRecordError
from hpcroll.fs import read_token
from hpcroll.gateway import read_journal
from hpcroll.spool import Spool, read_end
from hpcroll.trajectory import build


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a rollout, in the leg that runs its agent."""

    attempt: int
    incarnation: str
    state: str
    """What became of it, in words."""


def attempts_at(spool: Spool, ref: RolloutRef) -> Iterator[Attempt]:
    """The attempts that ran the agent of rollout `ref`, oldest first."""
    legs = spool.config.legs
    leg = spool.config.leg_names[next(n for n, stages in enumerate(legs) if Stage.RUN in stages)]
    number = 1
    while (incarnation := read_token(spool.paths.claim_link(leg, ref, number))) is not None:
        yield Attempt(number, incarnation, _state(spool, leg, ref, number, incarnation))
        number += 1


def partial_trajectory(spool: Spool, ref: RolloutRef, *, attempt: int | None = None) -> Trajectory:
    """What the journal holds of an attempt at rollout `ref`: the given one, else the latest that made calls.

    Its record says in `partial` what became of the attempt; it has no reward and is not trainable. Calls
    in flight are not in it, and neither are messages of tools after the last call. Raises `ConfigError`
    where there is no such attempt, or none has made a call yet.
    """
    found = list(attempts_at(spool, ref))
    wanted = [one for one in found if attempt in (None, one.attempt)]
    if not wanted:
        which = "no committed result yet and no attempt" if attempt is None else f"no attempt {attempt}"
        raise ConfigError(f"rollout {ref} has {which}; see `hpcroll status {spool.paths.root}`")
    for one in reversed(wanted):
        calls, gaps = _journalled(spool, ref, one)
        if calls or gaps:
            return _assembled(spool, ref, one, calls, gaps)
    states = "; ".join(one.state for one in wanted)
    raise ConfigError(f"rollout {ref} has no committed result and no model call in a journal yet ({states})")


def _state(spool: Spool, leg: str, ref: RolloutRef, number: int, incarnation: str) -> str:
    who = f"attempt {number} on {incarnation}"
    if spool.is_done(ref):
        return f"{who} of a rollout that is committed"
    end = read_end(spool.paths.end_file(leg, ref, number))
    if end is not None:
        said = f": {end.failure.error}: {end.failure.message}" if end.failure.message else ""
        return f"{who} ended without a result, {end.failure.reason}{said}"
    if spool.is_done(ref, leg):
        return f"{who}, whose rollout waits for a later leg"
    if spool.paths.ended_file(incarnation).exists():
        return f"{who} was killed with its worker"
    return f"{who} has not ended, or was killed a moment ago"


def _journalled(
    spool: Spool, ref: RolloutRef, attempt: Attempt
) -> tuple[tuple[RecordedCall, ...], tuple[str, ...]]:
    """The attempt's calls in order of their start, and what of them cannot be read."""
    path = spool.paths.journal_file(attempt.incarnation)
    calls: list[RecordedCall] = []
    gaps: tuple[str, ...] = ()
    if path.exists():
        try:
            for recorded in read_journal(path, rollout_id=ref.rollout_id, attempt=attempt.attempt):
                calls.append(recorded)  # one by one: what comes before damage is good
        except CorruptRecordError as error:
            gaps = (str(error),)
    return tuple(sorted(calls, key=lambda recorded: recorded.call.call_index)), gaps


def _assembled(
    spool: Spool, ref: RolloutRef, attempt: Attempt, calls: tuple[RecordedCall, ...], gaps: tuple[str, ...]
) -> Trajectory:
    config, rollout = spool.config, spool.rollout(ref)
    built = build(
        calls,
        train_on_shaped_logprobs=config.model.train_on_shaped_logprobs,
        roles=config.model.train_roles,
        policies=(config.model.name,),
    )
    record = TrajectoryRecord(
        run_id=spool.run_id,
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        group_size=rollout.group_size,
        sample_index=rollout.sample_index,
        task_id=rollout.task.task_id,
        task_sha256=rollout.task.digest(),
        dataset=rollout.task.dataset,
        attempt=attempt.attempt,
        incarnation=attempt.incarnation,
        handler=rollout.task.handler,
        harness=config.harness.name,
        harness_version="",
        config_sha256=config.digest(),
        status=Status.FAILED,
        stop_reason=StopReason.ERROR,
        partial=attempt.state,
        trainable=False,
        not_trainable_because=(f"partial: {attempt.state}", *built.masked),
        segments=built.segments,
        calls=tuple(recorded.call for recorded in calls),
        call_spans=built.call_spans,
        dropped=built.dropped,
        gaps=(*built.gaps, *gaps),
        model_name=config.model.name,
    )
    return Trajectory(record, built.tokens)
