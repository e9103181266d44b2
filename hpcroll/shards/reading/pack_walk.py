"""A reader's way through the packs: every row that was not handed out on level 0."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hpcroll.errors import ShardCorruptError
from hpcroll.shards.format.place import Place
from hpcroll.shards.format.stored import Column, StoredTrajectory
from hpcroll.shards.level1.chain import Manifest
from hpcroll.shards.level1.pack_file import OpenPack
from hpcroll.shards.reading.cursor import Cursor
from hpcroll.shards.reading.shuffle import Part
from hpcroll.shards.reading.store import GONE, Store


class PackWalk:
    """Goes on from where `cursor` stands in the chain of packs, and moves it."""

    def __init__(self, store: Store, cursor: Cursor, columns: frozenset[Column], part: Part) -> None:
        self._store = store
        self._cursor = cursor
        self._columns = columns
        self._part = part

    def advance(self) -> Iterator[StoredTrajectory]:
        """The rows that were not handed out, of every pack that is known; the cursor has passed each of them
        when it is yielded."""
        while self._cursor.pack < len(self._store.chain):
            manifest = self._store.chain[self._cursor.pack]
            if self._may_hold_more(manifest):
                self._store.counts.opens += 1
                with self._store.open_pack(manifest.generation) as pack:
                    self._store.counts.corrupt += pack.index_damaged
                    yield from self._rows(manifest, pack)
            self._cursor.pass_pack(manifest)

    def _may_hold_more(self, manifest: Manifest) -> bool:
        """Whether the pack may hold a row that was not handed out; a follower passes most without a look."""
        for name, moved in manifest.inputs.items():
            had = self._cursor.was_had(name)
            if had.seen < moved.end or any(offset < moved.end for offset in had.pending):
                return True
        return False

    def _rows(self, manifest: Manifest, pack: OpenPack) -> Iterator[StoredTrajectory]:
        lost: set[int] = set()
        for row in self._unread(manifest, pack):
            self._cursor.rows = row + 1
            try:
                stored = pack.read(row, self._columns)
            except ShardCorruptError:
                elsewhere = self._on_level0(pack.place(row))
                if elsewhere is None:
                    self._count_lost(pack.block_of(row), lost)
                    continue
                stored = elsewhere
            self._store.counts.delivered += 1
            yield stored

    def _on_level0(self, place: Place) -> StoredTrajectory | None:
        """The record that a damaged row came from, where retention has left it."""
        try:
            return self._store.on_level0(place, self._columns)
        except OSError as error:
            if error.errno not in GONE:
                raise
            return None

    def _unread(self, manifest: Manifest, pack: OpenPack) -> list[int]:
        found: list[NDArray[np.int64]] = []
        for name in manifest.inputs:
            rows, had = pack.rows_of_shard(name), self._cursor.was_had(name)
            if had.seen:
                offsets = pack.rows.offset[rows].astype(np.int64)
                open_ones = np.fromiter(had.pending, np.int64, len(had.pending))
                rows = rows[(offsets >= had.seen) | np.isin(offsets, open_ones)]
            found.append(rows)
        unread = np.sort(np.concatenate(found)) if found else np.empty(0, np.int64)
        unread = unread[unread >= self._cursor.rows]
        if self._part.count > 1:
            groups, inverse = np.unique(pack.rows.group[unread], return_inverse=True)
            mine = [self._part.owns(pack.rows.strings[group]) for group in groups]
            unread = unread[np.array(mine, np.bool_)[inverse]]
        numbers: list[int] = unread.tolist()
        return numbers

    def _count_lost(self, block: int, lost: set[int]) -> None:
        counts = self._store.counts
        counts.committed_lost += 1
        if block not in lost:
            counts.corrupt += 1
            lost.add(block)
