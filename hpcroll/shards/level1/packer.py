"""Rewrites committed groups of level 0 as packs."""

from __future__ import annotations

import errno
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from hpcroll.errors import ShardCorruptError, ShardError
from hpcroll.fs.atomic import list_names, make_directories, read_fresh
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.place import Place
from hpcroll.shards.format.run_facts import read_run_facts
from hpcroll.shards.level0.shard_file import OpenShard
from hpcroll.shards.level1.block_writer import PackedRow
from hpcroll.shards.level1.chain import Manifest, PackChain
from hpcroll.shards.level1.pack_index import IndexPlace
from hpcroll.shards.level1.pack_writer import PackFileWriter
from hpcroll.shards.level1.sharing import SAMPLES, make_shared
from hpcroll.shards.level1.survey import Entry, Survey

if TYPE_CHECKING:
    from hpcroll.config import ShardConfig  # at run time the trainer's side needs no config

_MIB = 1 << 20
_GONE = frozenset({errno.ENOENT, errno.ESTALE})
_MOST_ROWS = 1 << 16
"""Rows of one pack, which bounds its index."""
_SHARED_BLOCK_BYTES = 3 * _MIB
"""Raw bytes up to which several groups share a block."""
_MOST_BLOCK_BYTES = 16 * _MIB
"""Raw bytes beyond which a group is split over several blocks."""


@dataclass(frozen=True, slots=True)
class PackOptions:
    """`target_mb`: size in MiB at which a pack is closed. `min_mb`: level-0 MiB below which nothing is packed
    yet. `level`: zstd's.
    `float16`: log-probabilities in half the bytes. `everything`: also what is committed of incomplete groups.
    """

    target_mb: float = 256
    min_mb: float = 0
    level: int = 6
    float16: bool = False
    everything: bool = False

    @classmethod
    def of(cls, config: ShardConfig) -> Self:
        """The options that a run's config gives to packers that go on by themselves."""
        return cls(
            target_mb=config.pack_mb,
            min_mb=config.pack_mb,
            level=config.pack_level,
            float16=config.pack_logprobs == "float16",
        )


@dataclass(frozen=True, slots=True)
class MadePack:
    """One pack that was published."""

    generation: int
    file: str
    rows: int
    groups: int
    size_bytes: int
    level0_bytes: int


@dataclass(slots=True)
class PackReport:
    """What a packer did."""

    packs: list[MadePack] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """Committed records whose bytes are not as written, one line each; they stay in level 0."""
    thrown_away: int = 0
    """Packs that another packer had made first."""
    orphans: int = 0
    """Data files of packers that died, removed."""


class Packer:
    """Makes packs of one run; any number of packers may do so at once, on any nodes.

    A pack becomes visible as a whole, with its manifest. Killed at any moment, a packer leaves at most a data
    file that no manifest names, which a later one removes. Memory: one block, and what `Survey` says.
    """

    def __init__(self, paths: RunPaths, options: PackOptions | None = None) -> None:
        """Raises `ShardError` where there is no run at `paths`."""
        self._paths = paths
        self._options = options or PackOptions()
        self._chain = PackChain(paths)
        self._late: set[Place] = set()
        """Entries that could not be read in this pass."""
        self._survey = Survey(paths, read_run_facts(paths).final_leg)

    def pack(self) -> PackReport:
        """Packs what can be packed now."""
        report = PackReport()
        self._late.clear()
        make_directories([self._paths.packs])
        while self._pack_once(report):
            pass
        report.damaged = [
            f"{self._paths.shard_file(place.shard.incarnation, place.shard.index)}@{place.offset}"
            for place in self._survey.damaged()
        ]
        report.orphans = remove_orphans(self._paths, self._chain)
        return report

    def _pack_once(self, report: PackReport) -> bool:
        """Makes one pack; False where there is nothing (more) to pack."""
        try:
            return self._make(report)
        except OSError as error:
            before = len(self._chain)
            if error.errno not in _GONE or self._chain.refresh() == before:
                raise
            # Another packer took the number, and then this one's file for what a dead packer left.
            report.thrown_away += 1
            return True

    def _make(self, report: PackReport) -> bool:
        # Asked before the survey: whatever was committed before the run was closed is then seen.
        everything = self._options.everything or read_fresh(self._paths.closed) is not None
        self._chain.refresh()
        self._survey.advance(self._chain)
        groups = [
            group
            for group in self._survey.groups(everything=everything)
            if not any(entry.place in self._late for entry in group)
        ]
        ready_bytes = sum(entry.record_bytes for group in groups for entry in group)
        if not groups or (ready_bytes < self._options.min_mb * _MIB and not everything):
            return False
        path = self._paths.pack_file(len(self._chain), secrets.token_hex(8))
        shared = make_shared(
            self._samples(groups), sum(entry.raw_bytes for group in groups for entry in group)
        )
        with PackFileWriter(
            path, level=self._options.level, float16=self._options.float16, shared=shared
        ) as writer:
            contents = _Contents(writer)
            for group in groups:
                if contents.is_full(self._options):
                    break
                self._add(contents, group, everything=everything)
            contents.flush()
            if not writer.rows:
                return any(entry.place in self._late for group in groups for entry in group)
            index = writer.finish()
        self._publish(contents, path, index, report)
        return True

    def _samples(self, groups: list[list[Entry]]) -> list[PackedRow]:
        """The first rollout of each of the first groups, where it can be read."""
        found = []
        for group in groups[:SAMPLES]:
            with suppress(ShardError):
                found.append(self._read(group[0]))
        return found

    def _add(self, contents: _Contents, group: list[Entry], *, everything: bool) -> None:
        """Adds the group to a pack in the making; where a member cannot be read, only with `everything`."""
        sound = [entry for entry in group if self._is_sound(entry)]
        if sound and (everything or len(sound) == len(group)):
            contents.begin_group(sum(entry.raw_bytes for entry in sound))
            for entry in sound:
                contents.add(self._read(entry), entry.raw_bytes)

    def _is_sound(self, entry: Entry) -> bool:
        """Whether the record can be read whole; otherwise it is left where it is."""
        try:
            self._read(entry)
        except ShardError:
            self._survey.give_up(entry.place)
            self._late.add(entry.place)
            return False
        return True

    def _read(self, entry: Entry) -> PackedRow:
        with OpenShard(self._paths, entry.place.shard) as shard:
            header = shard.header_at(entry.place.offset)
            data = None if header is None else shard.frames_at(entry.place.offset, header)
        if header is None or data is None:
            raise ShardCorruptError(f"{entry.place}: the record is not as it was written")
        return PackedRow.of(entry.place, header, data)

    def _publish(self, contents: _Contents, path: Path, index: IndexPlace, report: PackReport) -> None:
        """Makes the file at `path`, which is durable, the next element of the chain.

        Throws it away where another packer has packed any of it meanwhile.
        """
        writer = contents.writer
        while True:
            generation = len(self._chain)
            manifest = Manifest(
                generation=generation,
                file=path.name,
                size_bytes=writer.size_bytes,
                rows=writer.rows,
                index_offset=index.offset,
                index_bytes=index.size_bytes,
                index_checksum=index.checksum,
                inputs=self._survey.inputs(self._chain, contents.places),
            )
            if self._chain.append(manifest):
                break
            self._chain.refresh()
            lost = any(self._chain.holds(place) for place in contents.places)
            # Under its old number the file may be taken for what a dead packer left, at any moment.
            moved = None if lost else self._renamed(path)
            if moved is None:
                path.unlink(missing_ok=True)
                report.thrown_away += 1
                return
            path = moved
        report.packs.append(
            MadePack(
                generation=generation,
                file=path.name,
                rows=writer.rows,
                groups=contents.groups,
                size_bytes=writer.size_bytes,
                level0_bytes=contents.level0_bytes,
            )
        )

    def _renamed(self, path: Path) -> Path | None:
        """The file under the number that is next now; None where it is gone."""
        try:
            return path.rename(self._paths.pack_file(len(self._chain), secrets.token_hex(8)))
        except FileNotFoundError:
            return None


@dataclass(slots=True)
class _Contents:
    """What went into a pack so far, and the block in the making."""

    writer: PackFileWriter
    places: set[Place] = field(default_factory=set)
    groups: int = 0
    level0_bytes: int = 0
    _block: list[PackedRow] = field(default_factory=list)
    _block_bytes: int = 0

    def is_full(self, options: PackOptions) -> bool:
        rows = self.writer.rows + len(self._block)
        return self.writer.size_bytes >= options.target_mb * _MIB or rows >= _MOST_ROWS

    def begin_group(self, raw_bytes: int) -> None:
        """A group of `raw_bytes` follows: small ones share a block, others begin one."""
        self.groups += 1
        if self._block_bytes + raw_bytes > _SHARED_BLOCK_BYTES:
            self.flush()

    def add(self, row: PackedRow, raw_bytes: int) -> None:
        if self._block_bytes + raw_bytes > _MOST_BLOCK_BYTES:
            self.flush()
        self._block.append(row)
        self._block_bytes += raw_bytes
        self.places.add(row.place)
        self.level0_bytes += row.header.record_bytes

    def flush(self) -> None:
        """Writes the block in the making."""
        if self._block:
            self.writer.add(self._block)
            self._block, self._block_bytes = [], 0


def remove_orphans(paths: RunPaths, chain: PackChain) -> int:
    """Removes data files that no manifest names and none will ever name; returns how many.

    A file made to become element g is beyond hope once element g names another: whoever made it, and lives,
    gives it a new name before trying again.
    """
    removed = 0
    for name in list_names(paths.packs):
        generation, dash, _ = name.partition("-")
        if not dash or not generation.isdecimal() or int(generation) >= len(chain):
            continue
        if chain[int(generation)].file != name:
            (paths.packs / name).unlink(missing_ok=True)
            removed += 1
    return removed
