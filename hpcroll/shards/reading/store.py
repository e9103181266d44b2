"""Records by place, on whichever level they lie now."""

from __future__ import annotations

import errno
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Collection
from types import TracebackType
from typing import Self

from hpcroll.contract import RolloutRef
from hpcroll.errors import ShardCorruptError
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.frames import HEADER_BYTES_MOST
from hpcroll.shards.format.place import Place, ShardName
from hpcroll.shards.format.stored import Column, StoredTrajectory
from hpcroll.shards.level0.shard_file import OpenShard, is_finished
from hpcroll.shards.level0.walk import ReadCounts
from hpcroll.shards.level1.chain import PackChain
from hpcroll.shards.level1.pack_file import OpenPack
from hpcroll.shards.reading.open_shards import OpenShards
from hpcroll.shards.reading.patience import Patience

_OPEN_PACKS = 4
"""How many packs, with their indexes and a block each, are kept open for random access."""
GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""What opening or reading a level-0 shard says once retention has deleted it."""


class Store:
    """Both levels of a run. Close it, or its files stay open until it is collected."""

    def __init__(self, paths: RunPaths, counts: ReadCounts) -> None:
        self.paths = paths
        self.counts = counts
        self.chain = PackChain(paths)
        self.shards = OpenShards(paths)
        self._packs: OrderedDict[int, OpenPack] = OrderedDict()
        self._gone: set[ShardName] = set()
        self._by_owner: defaultdict[str, list[int]] = defaultdict(list)
        self._indexed = 0
        weakref.finalize(self, _close, self._packs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes what is open; the next read opens it again."""
        _close(self._packs)
        self.shards.close()

    def refresh(self) -> int:
        """Looks for packs that were published since; how many there are."""
        self.counts.opens += 1
        known = len(self.chain)
        found = self.chain.refresh()
        self.counts.opens += found - known
        return found

    def pack(self, generation: int) -> OpenPack:
        """The `generation`-th pack, opened; it may be closed once others are asked for."""
        pack = self._packs.get(generation)
        if pack is None:
            self.counts.opens += 1
            pack = self._packs[generation] = self.open_pack(generation)
            while len(self._packs) > _OPEN_PACKS:
                self._packs.popitem(last=False)[1].close()
        self._packs.move_to_end(generation)
        return pack

    def open_pack(self, generation: int) -> OpenPack:
        """The `generation`-th pack, for the caller to close; raises `ShardCorruptError` where it is gone."""
        manifest = self.chain[generation]
        path = self.chain.data_file(manifest)
        try:
            return OpenPack(path, manifest)
        except OSError as error:
            if error.errno not in GONE:
                raise
            raise ShardCorruptError(
                f"{path} is gone, which holds {manifest.rows} rollouts (pack {generation}); put it back: "
                f"`hpcroll shards verify {self.paths.root}` says which of them level 0 still holds"
            ) from error

    def read_all(
        self, places: Collection[Place], columns: frozenset[Column], patience_s: float
    ) -> dict[Place, StoredTrajectory]:
        """The committed records at `places`, which somebody has seen; waits until they can be seen from here.

        Packed ones are read block by block. Those that are damaged for good are missing in the result, and
        counted. Raises `ShardCorruptError` for others that do not show within `patience_s` seconds.
        """
        found: dict[Place, StoredTrajectory] = {}
        missing = set(places)
        patience = Patience(patience_s)
        while missing:
            packed: dict[tuple[int, int], Place] = {}
            for place in sorted(missing, key=lambda p: (p.shard, p.offset)):
                if (stored := self._still_on_level0(place, columns)) is not None:
                    found[place] = stored
                elif (row := self._row(place)) is not None:
                    packed[row] = place
                elif self._is_lost(place, columns):
                    self._count_lost(place, missing)
            for (generation, number), place in sorted(packed.items()):
                try:
                    found[place] = self.pack(generation).read(number, columns)
                except ShardCorruptError:
                    self._count_lost(place, missing)
            missing -= found.keys()
            if missing and not patience.wait():
                place = min(missing, key=lambda p: (p.shard, p.offset))
                raise ShardCorruptError(
                    f"{self.paths.shard_file(place.shard.incarnation, place.shard.index)}: the record at "
                    f"{place.offset} is neither there nor in a pack; run `hpcroll shards verify`"
                )
        return found

    def packed_rollout(
        self, ref: RolloutRef, owner: str, columns: frozenset[Column]
    ) -> StoredTrajectory | None:
        """The record of `ref` that incarnation `owner` committed, from the packs that are known; None where
        they do not hold it."""
        for generation in self._packs_of(owner):
            pack = self.pack(generation)
            row = pack.row_of_rollout(ref)
            if row is not None:
                return pack.read(row, columns)
        return None

    def has_news(self) -> bool:
        """Whether packs were published since the last look, which has now been taken."""
        known = len(self.chain)
        return self.refresh() > known

    def _packs_of(self, incarnation: str) -> list[int]:
        """The packs that hold entries of the incarnation, the newest last."""
        for generation in range(self._indexed, len(self.chain)):
            for owner in {name.incarnation for name in self.chain[generation].inputs}:
                self._by_owner[owner].append(generation)
        self._indexed = len(self.chain)
        return self._by_owner.get(incarnation, [])

    def on_level0(self, place: Place, columns: frozenset[Column]) -> StoredTrajectory | None:
        """The record at `place` of its shard; None where that is not as written. Raises `OSError` where the
        shard is gone."""
        return self.shards.read(place, columns, self.counts)

    def _still_on_level0(self, place: Place, columns: frozenset[Column]) -> StoredTrajectory | None:
        """The same; None also where the shard is gone, which is remembered once packs hold the record."""
        if place.shard in self._gone:
            return None
        try:
            return self.on_level0(place, columns)
        except OSError as error:
            if error.errno not in GONE:
                raise
        self.refresh()
        if self.chain.holds(place):
            self._gone.add(place.shard)
        return None

    def _is_lost(self, place: Place, columns: frozenset[Column]) -> bool:
        """Whether the record's shard is there and will not change, although the record is not as written."""
        self.counts.opens += 3
        if not is_finished(self.paths, place.shard):
            return False
        try:
            # Now that the owner is known to be gone: bytes that only now show are not damage.
            return self.on_level0(place, columns) is None and self._shows(place)
        except OSError as error:
            if error.errno not in GONE:
                raise
            return False

    def _shows(self, place: Place) -> bool:
        """Whether the shard is long enough here to hold the record, as far as can be told."""
        with OpenShard(self.paths, place.shard) as shard:
            header = shard.header_at(place.offset)
            return shard.size >= place.offset + (
                header.record_bytes if header is not None else HEADER_BYTES_MOST
            )

    def _count_lost(self, place: Place, missing: set[Place]) -> None:
        missing.discard(place)
        self.counts.corrupt += 1
        self.counts.committed_lost += 1

    def _row(self, place: Place) -> tuple[int, int] | None:
        """The pack and the row that hold the entry at `place`; None where none is known to."""
        for generation in self._packs_of(place.shard.incarnation):
            moved = self.chain[generation].inputs.get(place.shard)
            if moved is not None and place.offset < moved.end and place.offset not in moved.left:
                # The first pack that does not leave it behind holds it, or nobody ever will.
                row = self.pack(generation).row_of(place)
                return None if row is None else (generation, row)
        return None


def _close(packs: OrderedDict[int, OpenPack]) -> None:
    while packs:
        packs.popitem()[1].close()
