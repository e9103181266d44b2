"""What exporters of one file per part, with one row per trained segment, have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from pydantic import Field

from hpcroll.config import Strict
from hpcroll.exporters.base import Fact, Part, Unit
from hpcroll.exporters.packages import need
from hpcroll.exporters.rows import Row, training_rows
from hpcroll.shards import Column

LOST_IN_ROWS = (
    Fact.TEXT,
    Fact.CONTEXT_ROLES,
    Fact.SEGMENTS,
    Fact.UNTRAINED,
    Fact.VERSION_RANGES,
    Fact.SAMPLING,
    Fact.LOGPROB_KIND,
    Fact.VERDICT,
    Fact.IDENTITY,
    Fact.CALLS,
    Fact.ACTIONS,
    Fact.TIMING,
)
"""What no format of rows has a place for."""


class TrainingOptions(Strict):
    """Options of every format with one row per trained segment."""

    normalise_std: bool = False
    """Divide advantages by the group's standard deviation (n - 1 in the denominator, plus 1e-6)."""
    groups: int | None = Field(default=None, ge=1)
    """Groups per part, for trainers that read one part per step; as many as fit where absent."""


class RowExporter:
    """Constructed without I/O; subclasses say how rows become bytes."""

    Options: ClassVar[type[Strict]] = TrainingOptions
    columns: ClassVar[frozenset[Column]] = frozenset({Column.TOKENS, Column.RECORD})
    unit: ClassVar[Unit] = Unit.GROUP
    packages: ClassVar[tuple[str, ...]] = ()
    """Modules that it needs."""
    name_format: ClassVar[str]
    """The name of part `number`'s file, for `str.format`."""

    def __init__(self, options: Any) -> None:
        self.options = options
        for module in self.packages:
            need(module, type(self).__name__)

    @property
    def groups_per_part(self) -> int | None:
        groups: int | None = self.options.groups
        return groups

    def names(self, number: int) -> tuple[str, ...]:
        return (self.name_format.format(number=number),)

    def files(self, part: Part) -> Iterator[tuple[str, bytes]]:
        rows = list(training_rows(part, normalise_std=self.options.normalise_std))
        yield self.names(part.number)[0], self.encode(part.number, rows)

    def encode(self, number: int, rows: Sequence[Row]) -> bytes:
        """One or more rows as the file of part `number`."""
        raise NotImplementedError
