"""What of level 0 no pack holds yet: which entries could be packed, and which must wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.codec import read_summary
from hpcroll.shards.format.frames import FrameKind, Header
from hpcroll.shards.format.place import Place, ShardName
from hpcroll.shards.level0.shard_file import OpenShard, committer, is_finished, list_shards, marks_of
from hpcroll.shards.level1.chain import Frontier, InputRange, PackChain

_SUMMARY = frozenset({FrameKind.SUMMARY})


@dataclass(frozen=True, slots=True)
class Entry:
    """A committed record that no pack holds."""

    place: Place
    record_bytes: int
    raw_bytes: int
    """Of all its columns, decompressed."""
    segment: str
    ordinal: int
    group_id: str
    group_size: int
    sample_index: int


@dataclass(slots=True)
class ShardSurvey:
    """One level-0 shard: every entry before `seen` is packed, dropped, or named in one of the three."""

    paths: RunPaths
    leg: str
    name: ShardName
    seen: int = 0
    ready: dict[int, Entry] = field(default_factory=dict)
    """Committed ones, by offset."""
    open: set[int] = field(default_factory=set)
    """Those of rollouts that nobody has committed yet."""
    damaged: set[int] = field(default_factory=set)
    """Committed ones, as far as can be told, whose bytes are not as written in a finished shard."""
    finished: bool = False

    @property
    def unpacked(self) -> set[int]:
        """Offsets of every entry before `seen` that may still be packed."""
        return {*self.ready, *self.open, *self.damaged}

    def advance(self, frontier: Frontier) -> None:
        """Takes over what packs hold by now, and looks at what is new in the shard.

        Nothing changes where the shard is gone: then all of it is packed.
        """
        self._forget_packed(frontier)
        # Asked before the shard is opened: an owner that ends after a torn look would turn it into damage.
        self.finished = self.finished or is_finished(self.paths, self.name)
        try:
            shard = OpenShard(self.paths, self.name)
        except FileNotFoundError:
            return
        with shard:
            for offset in sorted(self.open):
                self._look_again(shard, offset)
            self._look_on(shard)

    def _forget_packed(self, frontier: Frontier) -> None:
        for offset in [known for known in self.unpacked if frontier.holds(known)]:
            self.ready.pop(offset, None)
            self.open.discard(offset)
            self.damaged.discard(offset)
        if frontier.seen > self.seen:
            self.open.update(offset for offset in frontier.pending if offset >= self.seen)
            self.seen = frontier.seen

    def _look_again(self, shard: OpenShard, offset: int) -> None:
        header = shard.header_at(offset)
        if header is not None:
            self._judge(shard, offset, header)
        elif self.finished:
            self.open.discard(offset)
            self.damaged.add(offset)

    def _look_on(self, shard: OpenShard) -> None:
        while self.seen < shard.size:
            offset = self.seen
            header = shard.header_at(offset)
            if header is None:
                if not self.finished:
                    return
                if offset in marks_of(self.paths, self.name):
                    self.damaged.add(offset)
                following = shard.next_header_after(offset)
                self.seen = following if following is not None else shard.size
                continue
            end = offset + header.record_bytes
            if not self.finished and shard.header_at(end) is None and shard.frames_at(offset, header) is None:
                return  # in the middle of an append that may fail, and be followed by one of another length
            self.seen = end
            self._judge(shard, offset, header)

    def _judge(self, shard: OpenShard, offset: int, header: Header) -> None:
        """Says what becomes of the entry: it is ready, open, damaged, or dropped."""
        self.open.discard(offset)
        owner = committer(self.paths, self.leg, header.ref)
        if owner is None:
            self.open.add(offset)
        elif owner == self.name.incarnation:
            data = shard.frames_at(offset, header, _SUMMARY)
            if data is not None:
                self.ready[offset] = self._entry(offset, header, data)
            elif self.finished:
                self.damaged.add(offset)
            else:
                self.open.add(offset)

    def _entry(self, offset: int, header: Header, data: bytes) -> Entry:
        summary = read_summary(header, data)
        return Entry(
            place=Place(self.name, offset),
            record_bytes=header.record_bytes,
            raw_bytes=sum(frame.raw_bytes for frame in header.frames),
            segment=header.ref.segment,
            ordinal=header.ref.ordinal,
            group_id=summary.group_id,
            group_size=summary.group_size,
            sample_index=summary.sample_index,
        )


class Survey:
    """All shards of a run. Memory grows with the entries that no pack holds."""

    def __init__(self, paths: RunPaths, leg: str) -> None:
        self._paths = paths
        self._leg = leg
        self._shards: dict[ShardName, ShardSurvey] = {}

    def advance(self, chain: PackChain) -> None:
        """Looks at every shard anew; `chain` says what is packed."""
        for name in list_shards(self._paths):
            shard = self._shards.setdefault(name, ShardSurvey(self._paths, self._leg, name))
            shard.advance(chain.frontier(name))

    def groups(self, *, everything: bool) -> Iterator[list[Entry]]:
        """The groups that can be packed, in the order of their rollouts, members by sample index.

        Whole ones, or with `everything` whatever is committed of any.
        """
        members: dict[str, list[Entry]] = {}
        for shard in self._shards.values():
            for entry in shard.ready.values():
                members.setdefault(entry.group_id, []).append(entry)
        for group in members.values():
            group.sort(key=lambda entry: (entry.sample_index, entry.segment, entry.ordinal))
        taken = [group for group in members.values() if everything or len(group) >= group[0].group_size]
        return iter(sorted(taken, key=lambda group: (group[0].segment, group[0].ordinal)))

    def damaged(self) -> list[Place]:
        """Committed entries that cannot be read."""
        return [
            Place(shard.name, offset) for shard in self._shards.values() for offset in sorted(shard.damaged)
        ]

    def give_up(self, place: Place) -> bool:
        """Takes note that a committed entry could not be read; whether it is damaged, not only late."""
        shard = self._shards[place.shard]
        if shard.finished:
            shard.ready.pop(place.offset, None)
            shard.damaged.add(place.offset)
        return shard.finished

    def inputs(self, chain: PackChain, packed: set[Place]) -> dict[ShardName, InputRange]:
        """What the manifest of a pack that holds `packed` says, were it the next after `chain`."""
        found = {}
        for name, shard in self._shards.items():
            before = chain.frontier(name)
            end = max(shard.seen, before.seen)
            left = {offset for offset in shard.unpacked if not before.holds(offset)}
            left |= {offset for offset in before.pending if offset >= shard.seen}
            left -= {place.offset for place in packed if place.shard == name}
            if (end, left) != (before.seen, before.pending):
                found[name] = InputRange(before.seen, end, tuple(sorted(left)))
        return found
