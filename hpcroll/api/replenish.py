"""A pool of open groups that is kept full, for dynamic sampling: what a step drops is replaced.

Rank 0 of the trainer calls it after each step, and a thread looks after it between: a step that drops more
than was to spare would never be full. What is done stands in the pool's ledger first
(`hpcroll.policy.ledger`), so that a trainer that takes a step again does nothing twice.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from hpcroll.api.cancellation import commit_cancelled
from hpcroll.api.pool_tasks import PoolSettings, TaskOrder
from hpcroll.api.pool_watch import PoolWatch
from hpcroll.contract import Task
from hpcroll.errors import ConfigError, HpcrollError
from hpcroll.fs import list_names
from hpcroll.policy import PolicyRegistry
from hpcroll.policy.ledger import Fates, Ledger, PoolLine, ledger_name
from hpcroll.shards import Step, StepCounts
from hpcroll.spool import Spool

log = logging.getLogger(__name__)

_TEND_S = 1.0
"""Seconds between two looks at the run, between steps."""


@dataclass(frozen=True, slots=True)
class _Moment:
    """When a line is written: what the trainer had then."""

    step: int
    counts: StepCounts
    delivered: frozenset[str] = frozenset()
    last: bool = False
    between: bool = False

    def is_of(self, line: PoolLine) -> bool:
        """Whether `line` is this step's."""
        counts = (self.counts.delivered, self.counts.settled)
        return (line.step, line.last, line.fates.delivered, line.fates.settled) == (
            self.step,
            self.last,
            *counts,
        )


class Pool:
    """The open groups of one run, as its trainer wants them. Safe to use from several threads.

    A context manager: within it, a thread calls `tend` every second.
    """

    def __init__(self, spool: Spool, tasks: Sequence[Task], settings: PoolSettings) -> None:
        """`tasks` are checked, as they are submitted. Fills the pool, or goes on where it was left."""
        if not tasks:
            raise ConfigError(f"pool {settings.key!r} has no tasks")
        self._spool = spool
        # Its own, since the trainer's is for the trainer's thread.
        self._policy = PolicyRegistry(spool.paths, name=spool.config.model.name)
        self._told = (0, 0)
        self._order = TaskOrder(tasks, settings)
        self._settings = settings
        self._content = self._order.digest()
        self._ledger = Ledger(spool.paths, ledger_name(settings.key))
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._watch = PoolWatch(spool.paths.root, settings.use)
        lines = self._reload()
        if lines:
            self._require_same(lines[0])
            self._do(lines[-1])
        else:
            self._advance(_Moment(0, StepCounts()))
        self._policy.expect(more=not self.lines[-1].last)

    def __enter__(self) -> Self:
        self._stop.clear()
        self._thread = threading.Thread(target=self._keep_tending, name="hpcroll-pool", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def lines(self) -> tuple[PoolLine, ...]:
        """The ledger so far."""
        return self._ledger.lines()

    @property
    def dry(self) -> bool:
        """No task is left to submit: every epoch was gone through, or every task excluded."""
        line = self.lines[-1]
        return not any(True for _ in self._order.walk(line.epoch, line.offset, self._excluded()))

    def samplings(self) -> dict[str, int]:
        """How often each task was submitted, by task id."""
        counts = dict.fromkeys((task.task_id for task in self._order.tasks), 0)
        for line in self.lines:
            for index in (index for part in line.parts for index in part):
                counts[self._order.tasks[index].task_id] += 1
        return counts

    def after(self, step: Step, *, last: bool = False) -> PoolLine:
        """Fills the pool up after `step`, cancels what nobody needs, and tells the window what is settled.

        Returns the step's line of the ledger. A step that has one already, because the trainer takes it
        again after a restart, changes nothing. `last`: no step follows, so that every open group is
        cancelled; the same after step `steps` where that was given.
        """
        moment = _Moment(
            step.number,
            step.counts,
            delivered=frozenset(group.group_id for group in step.groups),
            last=last or step.number == self._settings.steps,
        )
        with self._lock:
            line = self._find(moment) or self._advance(moment)
            assert line is not None, "a step has a line"
            self._settle(step.counts)
            if line.last:
                self._policy.expect(more=False)
            return line

    def tend(self) -> PoolLine | None:
        """Replaces groups that no step will use, and cancels members that none will look at.

        The window is told of those groups at once, so that it does not keep their places from what replaces
        them. As the pool itself sees it, by the rule that it was given for the trainer's reader. Returns the
        line of the ledger that it wrote; None where nothing was to be done.
        """
        with self._lock:
            latest = next(line for line in reversed(self.lines) if not line.between)
            fates = latest.fates
            counts = StepCounts(
                delivered=fates.delivered,
                zero_variance=fates.zero_variance,
                short=fates.short + fates.cancelled,
                stale=fates.stale,
                incomplete=fates.incomplete,
            )
            if latest.last:
                return None
            line = self._advance(_Moment(latest.step, counts, between=True))
            self._settle(counts)
            return line

    def _settle(self, counts: StepCounts) -> None:
        """Tells the window what the trainer, or the pool on its behalf, is through with."""
        dropped = max(counts.settled - counts.delivered, self._watch.dropped)
        told = (counts.delivered + dropped, dropped)
        if told != self._told:
            self._policy.settle(told[0], dropped=told[1])
            self._told = told

    def _keep_tending(self) -> None:
        while not self._stop.wait(_TEND_S):
            try:
                self.tend()
            except (OSError, HpcrollError) as error:
                log.warning("pool=%s was not looked after: %s", self._settings.key, error)

    def _advance(self, moment: _Moment) -> PoolLine | None:
        """Writes the next line and does what it says, or what somebody else's line of that step says.

        None where nothing is to be done between steps.
        """
        while True:
            line = self._plan(moment)
            if line is None:
                return None
            if self._ledger.append(line):
                self._do(line)
                return line
            lines = self._reload()
            self._require_same(lines[0])
            self._do(lines[-1])
            found = None if moment.between else self._find(moment)
            if moment.between or found is not None:
                return found

    def _plan(self, moment: _Moment) -> PoolLine | None:
        """The next line; None where it would say nothing."""
        lines, watch, step = self.lines, self._watch, moment.step
        watch.look(moment.delivered, self._policy.latest())
        surplus = watch.decided_early(moment.delivered)
        fates = self._fates(lines, moment.counts)
        excluded = self._newly_excluded()
        target = 0 if moment.last else self._settings.target_after(step)
        # What was dropped or cancelled is as good as settled, whether the trainer has met it or not.
        useful = fates.submitted - fates.delivered - max(fates.dropped, watch.dropped) - len(watch.cancelling)
        missing = target - useful
        epoch, offset = (lines[-1].epoch, lines[-1].offset) if lines else (0, 0)
        parts: tuple[tuple[int, ...], ...] = ()
        if missing > 0:
            parts, epoch, offset = self._order.take(missing, epoch, offset, self._excluded() | set(excluded))
            if sum(map(len, parts)) < missing and not moment.between:
                log.warning("pool=%s is dry: no task is left to submit", self._settings.key)
        cancelled: tuple[str, ...] = ()
        if not moment.between and (moment.last or target < self._settings.target):
            cancelled = tuple(self._needless(-missing, everything=moment.last))
        if moment.between and not (parts or surplus):
            return None
        bias, withdrawn = watch.account()
        watch.surplus |= set(surplus)
        watch.cancelling |= set(cancelled)
        return PoolLine(
            number=len(lines),
            key=self._settings.key,
            content=self._content,
            step=step,
            last=moment.last,
            between=moment.between,
            fates=fates,
            parts=parts,
            epoch=epoch,
            offset=offset,
            surplus=surplus,
            cancelled=cancelled,
            withdrawn=withdrawn,
            excluded=excluded,
            bias=bias,
            watched=watch.state(),
        )

    def _do(self, line: PoolLine) -> None:
        """Everything here may be done twice."""
        for number, part in enumerate(line.parts):
            key = f"{line.key}/{line.number}" + (f".{number}" if number else "")
            tasks = [self._order.tasks[index] for index in part]
            self._spool.submit(tasks, samples=self._settings.samples, key=key)
        wishes = self._spool.wishes
        for group_id in (*line.surplus, *line.cancelled):
            segment, _, index = group_id.partition("/g")
            wishes.cancel(segment=segment, group=int(index))
        for group_id in line.withdrawn:
            segment, _, index = group_id.partition("/g")
            wishes.forget_cancelled(segment, int(index))
        if line.cancelled:
            # Workers see to what they run; what is beyond the window they may never look at.
            commit_cancelled(self._spool)

    def _fates(self, lines: Sequence[PoolLine], counts: StepCounts) -> Fates:
        seen = sum(segment.header.tasks for segment in self._spool.segments())
        # A listing may lack what was submitted a moment ago.
        submitted = max(seen, lines[-1].submitted if lines else 0)
        cancelled = min(counts.short, self._watch.cancelled)
        return Fates(
            delivered=counts.delivered,
            zero_variance=counts.zero_variance,
            short=counts.short - cancelled,
            cancelled=cancelled,
            stale=counts.stale,
            incomplete=counts.incomplete,
            open=max(0, submitted - counts.settled),
        )

    def _excluded(self) -> set[str]:
        return {task_id for line in self.lines for task_id in line.excluded}

    def _newly_excluded(self) -> tuple[str, ...]:
        limit = self._settings.exclude_after
        if limit is None:
            return ()
        flat = {task_id for task_id, count in self._watch.flat.items() if count >= limit}
        return tuple(sorted(flat - self._excluded()))

    def _needless(self, count: int, *, everything: bool) -> Iterator[str]:
        """Up to `count` groups (or every one) that are not committed, the last submitted ones first."""
        leg, paths = self._spool.config.leg_names[-1], self._spool.paths
        spoken_for = self._watch.cancelling | self._watch.surplus
        left = math.inf if everything else count
        for segment in reversed(self._spool.segments()):
            done: dict[int, int] = {}
            for directory in dict.fromkeys(paths.done_directory(leg, ref) for ref in segment.refs()):
                for name in list_names(directory):
                    if name.isdecimal():
                        done[int(name) // segment.samples] = done.get(int(name) // segment.samples, 0) + 1
            for index in reversed(range(segment.header.tasks)):
                group_id = f"{segment.name}/g{index}"
                if left < 1:
                    return
                if done.get(index, 0) < segment.samples and group_id not in spoken_for:
                    left -= 1
                    yield group_id

    def _find(self, moment: _Moment) -> PoolLine | None:
        for line in reversed(self.lines):
            if not line.between and moment.is_of(line):
                return line
        return None

    def _reload(self) -> tuple[PoolLine, ...]:
        lines = self.lines
        if lines:
            self._watch = PoolWatch(self._spool.paths.root, self._settings.use, lines[-1].watched)
        return lines

    def _require_same(self, line: PoolLine) -> None:
        if line.content != self._content:
            raise ConfigError(
                f"pool {self._settings.key!r} of run {self._spool.paths.root} was begun with other tasks, "
                "samples or seed; give the new ones another key"
            )
