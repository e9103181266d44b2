"""A pool of open groups that is kept full, for dynamic sampling: what a step drops is replaced.

Rank 0 of the trainer calls it after each step. What is done then stands first in the pool's ledger
(`hpcroll.policy.ledger`), so that a trainer that takes a step again does nothing twice.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcroll.api.cancellation import commit_cancelled
from hpcroll.api.pool_watch import PoolWatch
from hpcroll.contract import Task, sha256_hex
from hpcroll.errors import ConfigError
from hpcroll.fs import list_names
from hpcroll.policy import PolicyRegistry
from hpcroll.policy.ledger import Fates, Ledger, PoolLine, ledger_name
from hpcroll.shards import Step, StepCounts
from hpcroll.spool import Spool

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How full a pool is kept, and of what; see `Run.replenish`."""

    samples: int
    key: str
    groups_per_step: int
    oversample: float = 1.25
    steps_ahead: int = 1
    steps: int | None = None
    epochs: int | None = None
    exclude_after: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"samples": 1, "groups_per_step": 1, "oversample": 1, "steps_ahead": 1}
        least |= {"steps": 1, "epochs": 1, "exclude_after": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and not value >= bound:
                raise ConfigError(f"replenish: {name} is {value}; it must be {bound} or more")
        if not self.key:
            raise ConfigError("replenish: the pool needs a key: any text that names it, such as 'epoch0'")

    @property
    def target(self) -> int:
        """Groups that are kept open."""
        return math.ceil(self.groups_per_step * self.oversample * self.steps_ahead)

    def target_after(self, step: int) -> int:
        """The same after step `step`: no more than the steps that are left need."""
        if self.steps is None:
            return self.target
        left = max(0, self.steps - step)
        return min(self.target, math.ceil(self.groups_per_step * self.oversample * left))


class Pool:
    """The open groups of one run, as its trainer wants them. For one thread of one process."""

    def __init__(
        self, spool: Spool, policy: PolicyRegistry, tasks: Sequence[Task], settings: PoolSettings
    ) -> None:
        """`tasks` are checked, as they are submitted. Fills the pool, or goes on where it was left."""
        if not tasks:
            raise ConfigError(f"pool {settings.key!r} has no tasks")
        self._spool = spool
        self._policy = policy
        self._tasks = tasks
        self._settings = settings
        parts = [str(settings.samples), str(settings.seed), *(task.to_json() for task in tasks)]
        self._content = sha256_hex("\n".join(parts).encode())
        self._ledger = Ledger(spool.paths, ledger_name(settings.key))
        self._watch = PoolWatch(spool.paths.root)
        lines = self._reload()
        if lines:
            self._require_same(lines[0])
            self._do(lines[-1])
        else:
            self._advance(0, StepCounts(), delivered=(), early=())

    @property
    def lines(self) -> tuple[PoolLine, ...]:
        """The ledger so far."""
        return self._ledger.lines()

    @property
    def dry(self) -> bool:
        """No task is left to submit: every epoch was gone through, or every task excluded."""
        line = self.lines[-1]
        return not any(True for _ in self._walk(line.epoch, line.offset, self._excluded()))

    def samplings(self) -> dict[str, int]:
        """How often each task was submitted, by task id."""
        counts = dict.fromkeys((task.task_id for task in self._tasks), 0)
        for line in self.lines:
            for index in (index for part in line.parts for index in part):
                counts[self._tasks[index].task_id] += 1
        return counts

    def after(self, step: Step, *, last: bool = False) -> PoolLine:
        """Fills the pool up after `step`, cancels what nobody needs, and tells the window what is settled.

        Returns the step's line of the ledger. A step that has one already, because the trainer takes it
        again after a restart, changes nothing. `last`: no step follows, so that every open group is
        cancelled; the same after step `steps` where that was given.
        """
        counts = step.counts
        found = self._find(step.number, counts, last=last)
        if found is None:
            found = self._advance(
                step.number,
                counts,
                delivered=tuple(group.group_id for group in step.groups),
                early=tuple(group.group_id for group in step.groups if group.committed < group.size),
                last=last,
            )
        self._policy.settle(counts.settled, dropped=counts.settled - counts.delivered)
        return found

    def _advance(
        self,
        step: int,
        counts: StepCounts,
        *,
        delivered: Sequence[str],
        early: Sequence[str],
        last: bool = False,
    ) -> PoolLine:
        """Writes the next line and does what it says, or what somebody else's line of that step says."""
        while True:
            line = self._plan(step, counts, delivered=delivered, early=early, last=last)
            if self._ledger.append(line):
                break
            self._require_same(self._reload()[0])
            self._do(self.lines[-1])
            found = self._find(step, counts, last=last)
            if found is not None:
                return found
        self._do(line)
        return line

    def _plan(
        self,
        step: int,
        counts: StepCounts,
        *,
        delivered: Sequence[str],
        early: Sequence[str],
        last: bool,
    ) -> PoolLine:
        lines, watch = self.lines, self._watch
        bias, withdrawn = watch.look(delivered)
        surplus = tuple(group_id for group_id in early if watch.is_open(group_id))
        watch.surplus |= set(surplus)
        fates = self._fates(lines, counts)
        excluded = self._newly_excluded()
        target = 0 if last else self._settings.target_after(step)
        # What was cancelled is as good as settled, whether the trainer's reader has met its records or not.
        on_the_way = len(watch.cancelling) + watch.cancelled - fates.cancelled
        missing = target - (fates.open - on_the_way)
        epoch, offset = (lines[-1].epoch, lines[-1].offset) if lines else (0, 0)
        parts: tuple[tuple[int, ...], ...] = ()
        if missing > 0:
            parts, epoch, offset = self._take(missing, epoch, offset, self._excluded() | set(excluded))
        ends = last or step == self._settings.steps
        shrinks = self._settings.steps is not None and target < self._settings.target
        cancelled = tuple(self._needless(-missing, everything=ends)) if ends or shrinks else ()
        watch.cancelling |= set(cancelled)
        return PoolLine(
            number=len(lines),
            key=self._settings.key,
            content=self._content,
            step=step,
            last=last,
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
            tasks = [self._tasks[index] for index in part]
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

    def _take(
        self, count: int, epoch: int, offset: int, excluded: set[str]
    ) -> tuple[tuple[tuple[int, ...], ...], int, int]:
        """The next `count` tasks, in parts of one epoch each, and where the next one stands."""
        parts: dict[int, list[int]] = {}
        for found_epoch, place, index in self._walk(epoch, offset, excluded):
            parts.setdefault(found_epoch, []).append(index)
            epoch, offset = found_epoch, place + 1
            if sum(map(len, parts.values())) == count:
                break
        else:
            log.warning("pool=%s is dry: no task is left to submit", self._settings.key)
        return tuple(map(tuple, parts.values())), epoch, offset

    def _walk(self, epoch: int, offset: int, excluded: set[str]) -> Iterator[tuple[int, int, int]]:
        """Epoch, place in its order, and task index, from there on; ends where nothing is left."""
        if all(task.task_id in excluded for task in self._tasks):
            return
        while self._settings.epochs is None or epoch < self._settings.epochs:
            order = list(range(len(self._tasks)))
            random.Random(f"{self._settings.seed}/{epoch}").shuffle(order)
            for place in range(offset, len(order)):
                if self._tasks[order[place]].task_id not in excluded:
                    yield epoch, place, order[place]
            epoch, offset = epoch + 1, 0

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

    def _find(self, step: int, counts: StepCounts, *, last: bool) -> PoolLine | None:
        for line in reversed(self.lines):
            same = (line.step, line.last, line.fates.delivered, line.fates.settled)
            if same == (step, last, counts.delivered, counts.settled):
                return line
        return None

    def _reload(self) -> tuple[PoolLine, ...]:
        lines = self.lines
        if lines:
            self._watch = PoolWatch(self._spool.paths.root, lines[-1].watched)
        return lines

    def _require_same(self, line: PoolLine) -> None:
        if line.content != self._content:
            raise ConfigError(
                f"pool {self._settings.key!r} of run {self._spool.paths.root} was begun with other tasks, "
                "samples or seed; give the new ones another key"
            )
