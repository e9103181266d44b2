"""The ledger of a pool: immutable lines, one per step and some between, of what was done to keep it full.

Lines are created once each, by link, before what they say is done: whoever finds one does it again, and
everything that it says may be done twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, JsonValue, ValidationError

from hpcroll.contract import Frozen, Record, sha256_hex
from hpcroll.errors import CorruptRecordError
from hpcroll.fs import RunPaths, list_names, make_directories, publish, read_fresh


class Fates(Frozen):
    """What became of groups since the run began; with `open` they add up to what was submitted."""

    delivered: int = Field(default=0, ge=0)
    zero_variance: int = Field(default=0, ge=0)
    short: int = Field(default=0, ge=0)
    """Complete, with too few usable rollouts."""
    cancelled: int = Field(default=0, ge=0)
    """The same, because the pool cancelled all of it."""
    stale: int = Field(default=0, ge=0)
    incomplete: int = Field(default=0, ge=0)
    open: int = Field(default=0, ge=0)
    """Neither delivered nor dropped by then."""

    @property
    def settled(self) -> int:
        return self.dropped + self.delivered

    @property
    def dropped(self) -> int:
        return self.zero_variance + self.short + self.cancelled + self.stale + self.incomplete

    @property
    def submitted(self) -> int:
        return self.settled + self.open


class Spread(Frozen):
    """Lengths of some rollouts; None where there are none."""

    rollouts: int = Field(default=0, ge=0)
    tokens_mean: float | None = None
    """All tokens of all segments, context included."""
    tokens_median: float | None = None
    run_s_mean: float | None = None
    """Seconds in the run stage."""
    run_s_median: float | None = None


class Bias(Frozen):
    """How long the rollouts were that were kept, beside those that were cancelled.

    Of rollouts that were committed since the line before. What a cancelled one would have become is not
    known: its lengths are those at its end, a lower bound.
    """

    kept: Spread = Spread()
    """Rollouts that ended by themselves."""
    cancelled: Spread = Spread()
    """Rollouts that were cancelled at work."""
    never_started: int = Field(default=0, ge=0)
    """Rollouts that were cancelled before they began to run."""


class PoolLine(Record):
    """One line: the pool after a step, and what was done then."""

    SCHEMA: ClassVar[str] = "1.0"

    number: int = Field(ge=0)
    """Place in the ledger."""
    key: str
    content: str
    """Digest of the tasks, the samples and the seed: what the key stands for."""
    step: int = Field(ge=0)
    """The trainer's step; 0 for the first filling."""
    last: bool = False
    """No step follows."""
    between: bool = False
    """Written while the trainer waited for its next step, or trained: `step` is the one before."""
    fates: Fates
    """As the step had them, those of this line's submissions not yet among the open ones."""
    parts: tuple[tuple[int, ...], ...] = ()
    """Tasks submitted, by index; each part is a submission of its own, of one epoch."""
    epoch: int = Field(default=0, ge=0)
    """How often the whole task list was gone through after this line ..."""
    offset: int = Field(default=0, ge=0)
    """... and where in its order the next task stands."""
    surplus: tuple[str, ...] = ()
    """Groups that were decided with members to come, which were cancelled."""
    cancelled: tuple[str, ...] = ()
    """Groups that no step needs, all of which was cancelled."""
    withdrawn: tuple[str, ...] = ()
    """Groups whose cancellation has done its work: the wish was taken back."""
    excluded: tuple[str, ...] = ()
    """Tasks (by id) that are not submitted any more from now on: their groups had no variance."""
    bias: Bias = Bias()
    watched: Mapping[str, JsonValue] = {}
    """Where the pool has read to, and what it knows of the groups that were open then."""

    @property
    def added(self) -> int:
        """Groups that were submitted with this line."""
        return sum(map(len, self.parts))

    @property
    def submitted(self) -> int:
        """Groups that the run had after this line."""
        return self.fates.submitted + self.added


def ledger_name(key: str) -> str:
    """The name of the directory that holds the ledger of pool `key`."""
    return sha256_hex(key.encode())[:16]


class Ledger:
    """The lines of one pool. For one thread."""

    def __init__(self, paths: RunPaths, name: str) -> None:
        """`name`: that of its directory, see `ledger_name`."""
        self._paths = paths
        self._name = name
        self._lines: list[PoolLine] = []

    def lines(self) -> tuple[PoolLine, ...]:
        """Every line so far, each read once, `watched` only of the last one; raises `CorruptRecordError`."""
        while (data := read_fresh(path := self._paths.pool_line(self._name, len(self._lines)))) is not None:
            try:
                line = PoolLine.from_json(data)
            except ValidationError as error:
                raise CorruptRecordError(f"{path} is not a line of a pool's ledger: {error}") from error
            # The state is large, and only the last one counts.
            self._lines[-1:] = [before.model_copy(update={"watched": {}}) for before in self._lines[-1:]]
            self._lines.append(line)
        return tuple(self._lines)

    def append(self, line: PoolLine) -> bool:
        """Adds `line`, durable on return; False where somebody else added one with its number."""
        path = self._paths.pool_line(self._name, line.number)
        make_directories([path.parent])
        return publish(path, line.to_json().encode())


def read_pools(paths: RunPaths) -> dict[str, tuple[PoolLine, ...]]:
    """The ledgers of a run by the key of their pool."""
    ledgers = (Ledger(paths, name).lines() for name in sorted(list_names(paths.pools)))
    return {lines[0].key: lines for lines in ledgers if lines}
