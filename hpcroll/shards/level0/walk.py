"""A reader's way through one shard: every record that `done` confirms is handed out once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.commit_log import RecordAddress
from hpcroll.shards.format.frames import Header
from hpcroll.shards.format.place import Place, ShardName
from hpcroll.shards.format.stored import Column, StoredTrajectory, frames_of, stored_record
from hpcroll.shards.level0.shard_file import OpenShard, committer, is_finished, marks_of


@dataclass(slots=True)
class ReadCounts:
    """What a reader met besides what it delivered."""

    delivered: int = 0
    superseded: int = 0
    """Records of attempts that lost."""
    corrupt: int = 0
    """Damaged places in finished shards, a torn last record included; each is skipped."""
    committed_lost: int = 0
    """Those of them that held a committed record."""
    opens: int = 0
    """Files that were opened, also in vain."""
    listings: int = 0
    """Directories that were listed."""


class _Fate(Enum):
    COMMITTED = auto()
    SUPERSEDED = auto()
    OPEN = auto()
    """Nothing is committed for its rollout, as far as can be seen now."""


@dataclass(slots=True)
class ShardWalk:
    """Position in one shard: every record before `seen` is settled, except those at `pending`."""

    paths: RunPaths
    name: ShardName
    leg: str
    columns: frozenset[Column]
    trust_marks: bool
    counts: ReadCounts
    seen: int = 0
    pending: list[int] = field(default_factory=list)
    light: bool = False
    """Check the bytes of `columns`, and keep those of the summary alone."""
    settled: bool = False
    """The shard is finished and all of it was handed out or given up."""

    def advance(self) -> Iterator[StoredTrajectory]:
        """The records that became deliverable; the position has passed each of them when it is yielded.

        A tail that is short, zeroed or does not match its checksum is waited for while the shard's owner
        may still write; once the shard is finished it is counted as corrupt and passed over.
        """
        # Asked before the shard is opened: an owner that ends after a torn look would turn that look
        # into damage.
        finished = is_finished(self.paths, self.name)
        self.counts.opens += 3
        marks = _LazyMarks(self._read_marks)
        with OpenShard(self.paths, self.name) as shard:
            for offset in tuple(self.pending):
                yield from self._visit(shard, offset, shard.header_at(offset), marks, finished)
            following: Header | None = None
            while self.seen < shard.size:
                offset = self.seen
                header = following or shard.header_at(offset)
                if header is None:
                    if not finished:
                        return
                    self._pass_damage(shard, marks)
                    continue
                end = offset + header.record_bytes
                following = shard.header_at(end)
                if not finished and following is None and shard.frames_at(offset, header) is None:
                    # In the middle of an append. Should it fail (no space), another record takes its place,
                    # of another length: so this header does not say yet where the next one begins.
                    return
                self.seen = end
                self.pending.append(offset)
                yield from self._visit(shard, offset, header, marks, finished)
        self.settled = finished and not self.pending

    def is_idle(self) -> bool:
        """Whether one cheap look shows that nothing can have changed."""
        if self.pending:
            return False
        self.counts.opens += 1
        with OpenShard(self.paths, self.name) as shard:
            return shard.size <= self.seen

    def _visit(
        self, shard: OpenShard, offset: int, header: Header | None, marks: _LazyMarks, finished: bool
    ) -> Iterator[StoredTrajectory]:
        """Hands out the pending record at `offset` if it is committed, and keeps it if it may become so."""
        if header is None:  # seen before: only damage takes a header away
            if finished:
                self._give_up(offset, committed=offset in marks())
            return
        fate = self._fate(header, offset, marks)
        if fate is _Fate.SUPERSEDED:
            self.pending.remove(offset)
            self.counts.superseded += 1
        elif fate is _Fate.COMMITTED:
            stored = self._read(shard, offset, header)
            if stored is not None:
                self.pending.remove(offset)
                self.counts.delivered += 1
                yield stored
            elif finished:
                self._give_up(offset, committed=True)
        elif finished and shard.frames_at(offset, header) is None:
            self._give_up(offset, committed=False)

    def _fate(self, header: Header, offset: int, marks: _LazyMarks) -> _Fate:
        if self.trust_marks:
            mark = marks().get(offset)
            if mark is not None and mark.checksum == header.checksum:
                return _Fate.COMMITTED
        self.counts.opens += 1
        owner = committer(self.paths, self.leg, header.ref)
        if owner is None:
            return _Fate.OPEN
        return _Fate.COMMITTED if owner == self.name.incarnation else _Fate.SUPERSEDED

    def _read(self, shard: OpenShard, offset: int, header: Header) -> StoredTrajectory | None:
        """The record with its chosen columns; None where their bytes are not (yet) as written."""
        data = shard.frames_at(offset, header, frames_of(self.columns))
        if data is None:
            return None
        if self.light:
            summary = data[: header.prefix_bytes(frames_of(()))]
            return stored_record(Place(self.name, offset), header, frozenset(), summary)
        return stored_record(Place(self.name, offset), header, self.columns, data)

    def _read_marks(self) -> dict[int, RecordAddress]:
        self.counts.opens += 2
        return marks_of(self.paths, self.name)

    def _give_up(self, offset: int, *, committed: bool) -> None:
        self.pending.remove(offset)
        self.counts.corrupt += 1
        self.counts.committed_lost += committed

    def _pass_damage(self, shard: OpenShard, marks: _LazyMarks) -> None:
        """Moves `seen` past bytes that hold no sound header, to the next record that can be found."""
        mark = marks().get(self.seen)
        following = shard.next_header_after(self.seen)
        self.counts.corrupt += 1
        self.counts.committed_lost += mark is not None
        self.seen = following if following is not None else shard.size


class _LazyMarks:
    """The shard's marks, read when first needed."""

    def __init__(self, read: Callable[[], dict[int, RecordAddress]]) -> None:
        self._read = read
        self._marks: dict[int, RecordAddress] | None = None

    def __call__(self) -> dict[int, RecordAddress]:
        if self._marks is None:
            self._marks = self._read()
        return self._marks
