"""Steps from plans: rank 0 publishes them, every rank loads its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

from hpcroll.errors import ShardError
from hpcroll.shards.format.stored import Column
from hpcroll.shards.reading.batches import Batch, batch_of
from hpcroll.shards.reading.patience import Patience
from hpcroll.shards.reading.plan import Plan, PlanFiles, branch_name
from hpcroll.shards.reading.planner import Planner, StepSettings
from hpcroll.shards.reading.rows import Row, load_row
from hpcroll.shards.reading.session import Session
from hpcroll.shards.reading.step import Settle, Step, StepCounts
from hpcroll.shards.reading.store import Store

_TOKENS = frozenset({Column.TOKENS})


@dataclass(slots=True)
class Position:
    """Where a trainer stands: the branch of its plans, the last step it took, and the state after it."""

    branch: str
    settings: Mapping[str, Any]
    """What the branch was planned under."""
    number: int
    session: Mapping[str, Any]
    counts: StepCounts

    def to_json(self) -> dict[str, Any]:
        return {
            "branch": self.branch,
            "settings": self.settings,
            "step": self.number,
            "session": self.session,
            "counts": asdict(self.counts),
        }

    def pass_plan(self, plan: Plan) -> None:
        self.number, self.session, self.counts = plan.number, plan.state, plan.counts


@dataclass(frozen=True, slots=True)
class Stepping:
    """One rank's way through the steps. `files` gives the plans of a branch, None where nothing is
    written: a single rank without a name."""

    rank: int
    settings: StepSettings
    files: Callable[[str], PlanFiles | None]
    new_session: Callable[[Mapping[str, Any]], Session]
    store: Store
    stop: Callable[[], bool]
    timeout_s: float
    sign: Callable[[], object] = lambda: None
    """What rank 0 changes while it lives."""
    settle: Settle | None = None
    """Told, on rank 0, of groups that are dropped while a step is being filled."""

    def steps(self, position: Position) -> Iterator[Step]:
        """The steps after `position`, which has passed each of them when it is yielded."""
        planner: Planner | None = None
        taken = 0
        while True:
            number = position.number + 1
            plan = self._published(position, number)
            if plan is not None:
                planner = None  # it was at work on this very step, and somebody else was first
            elif self.rank == 0:
                planner = planner or self._planner(position)
                mine = planner.plan(number)
                files = self.files(position.branch)
                plan = mine if files is None else files.publish(mine)
                if plan is not mine:
                    planner = None
            else:
                plan = self._awaited(position, number)
            if plan.end is None:
                position.pass_plan(plan)
                taken += 1
                yield self._step(plan)
                continue
            ours = planner is not None or taken > 0
            if plan.end == "closed":
                position.counts = plan.counts
                return
            position.branch = branch_name({"after": position.branch}, number, plan.state)
            position.counts = plan.counts
            if ours or self.stop():
                return
            # It was stopped there before, and goes on now.

    def _published(self, position: Position, number: int) -> Plan | None:
        files = self.files(position.branch)
        return None if files is None else files.read(number)

    def _planner(self, position: Position) -> Planner:
        session = self.new_session(position.session)
        return Planner(session, self.settings, position.counts, dict(position.session), self.settle)

    def _awaited(self, position: Position, number: int) -> Plan:
        """The plan that rank 0 will publish."""
        files, wait = self.files(position.branch), Patience(self.timeout_s, self.sign)
        assert files is not None, "several ranks have a name"
        while (plan := files.read(number)) is None:
            if not wait.wait():
                raise ShardError(
                    f"rank {self.rank}: no plan of step {number} at {files.path(number)} after "
                    f"{self.timeout_s:g} s, and no sign of life from rank 0; look at rank 0, or give "
                    "steps() a longer timeout_s"
                )
        return plan

    def _step(self, plan: Plan) -> Step:
        mine = plan.layout[self.rank]
        return Step(
            number=plan.number,
            batches=_Batches(self, plan.rows, mine),
            groups=plan.groups,
            rollouts=len({row.place for row in plan.rows}),
            trained_tokens=sum(row.trained for row in plan.rows),
            counts=plan.counts,
            versions=plan.versions,
        )

    def load(self, rows: Sequence[Row]) -> Batch:
        """The batch of `rows`; waits for records that this rank's mount does not show yet. Those that were
        damaged since they were planned are left out, and counted."""
        stored = self.store.read_all({row.place for row in rows}, _TOKENS, self.timeout_s)
        return batch_of([load_row(row, stored[row.place]) for row in rows if row.place in stored])


@dataclass(frozen=True, slots=True)
class _Batches(Sequence[Batch]):
    """A rank's micro-batches, read when asked for."""

    stepping: Stepping
    rows: tuple[Row, ...]
    layout: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.layout)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(index, slice):
            return _Batches(self.stepping, self.rows, self.layout[index])
        return self.stepping.load([self.rows[number] for number in self.layout[index]])
