"""A position in the stream over both levels: where each level-0 shard stands, and how far in the packs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcroll.errors import ConfigError, ShardError
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.place import ShardName
from hpcroll.shards.format.stored import Column
from hpcroll.shards.level0.walk import ReadCounts, ShardWalk
from hpcroll.shards.level1.chain import Frontier, InputRange, Manifest
from hpcroll.shards.reading.patience import Patience
from hpcroll.shards.reading.store import Store

_PACKS_SHOW_S = 120.0
"""Seconds until packs that another node has read must show here."""


class Cursor:
    """Which entries were handed out: in packs before number `pack` all of them, and of that one the first
    `rows` rows; on level 0 what the walk of each shard says.

    A shard without a walk stands where the packs before `pack` leave it: nothing but that was handed out.
    """

    def __init__(
        self,
        paths: RunPaths,
        leg: str,
        columns: frozenset[Column],
        trust_marks: bool,
        counts: ReadCounts,
        *,
        light: bool,
    ) -> None:
        self.pack = 0
        self.rows = 0
        self._paths = paths
        self._leg = leg
        self._columns = columns
        self._trust_marks = trust_marks
        self._counts = counts
        self._light = light
        self._walks: dict[ShardName, ShardWalk] = {}
        self._packed: dict[ShardName, Frontier] = {}
        """What the packs before `pack` leave."""

    def walk(self, name: ShardName) -> ShardWalk:
        """The walk through a shard."""
        walk = self._walks.get(name)
        if walk is None:
            packed = self._packed.get(name) or Frontier()
            walk = self._walks[name] = ShardWalk(
                self._paths,
                name,
                self._leg,
                self._columns,
                self._trust_marks,
                self._counts,
                seen=packed.seen,
                pending=sorted(packed.pending),
                light=self._light,
            )
        return walk

    def was_had(self, name: ShardName) -> Frontier:
        """What of a shard was handed out: the entries that the result `holds`."""
        walk = self._walks.get(name)
        if walk is None:
            return self._packed.get(name) or Frontier()
        return Frontier(walk.seen, set(walk.pending))

    def pass_pack(self, manifest: Manifest) -> None:
        """Goes past the pack, all of which was handed out now or before."""
        for name, moved in manifest.inputs.items():
            if name in self._walks:
                _merge(self._walks[name], moved)
            self._packed[name] = Frontier(moved.end, set(moved.left))
        self.pack, self.rows = manifest.generation + 1, 0

    def forget(self, name: ShardName) -> None:
        """Lets go of a shard that is gone, where the packs say the same of it."""
        if name in self._walks and not self._differs(name):
            del self._walks[name]

    def state(self) -> dict[str, Any]:
        """As JSON: the position in the packs, and what differs from what they leave: per shard the bytes
        passed and the offsets that may still be committed."""
        return {
            "pack": [self.pack, self.rows],
            "shards": {
                str(name): [walk.seen, list(walk.pending)]
                for name, walk in self._walks.items()
                if self._differs(name)
            },
        }

    def load(self, state: Mapping[str, Any], store: Store) -> None:
        """Goes to what `state` gave; waits for packs that do not show yet."""
        pack, rows = (int(number) for number in state["pack"])
        patience = Patience(_PACKS_SHOW_S)
        while store.refresh() < pack + (rows > 0):
            if not patience.wait():
                raise ShardError(
                    f"{self._paths.pack_manifest(pack - 1)} does not show here, though the reader has passed "
                    "it; check that this is the same run directory"
                )
        self._walks.clear()
        self._packed.clear()
        self.pack = self.rows = 0
        for generation in range(pack):
            self.pass_pack(store.chain[generation])
        self.rows = rows
        for text, (seen, pending) in state["shards"].items():
            name = ShardName.parse(text)
            if name is None:
                raise ConfigError(f"reader state names {text!r}, which is no shard")
            walk = self.walk(name)
            walk.seen, walk.pending, walk.settled = int(seen), [int(offset) for offset in pending], False

    def _differs(self, name: ShardName) -> bool:
        walk, packed = self._walks[name], self._packed.get(name) or Frontier()
        return walk.seen != packed.seen or set(walk.pending) != packed.pending


def _merge(walk: ShardWalk, moved: InputRange) -> None:
    """What a pack did to a shard, in the terms of a walk through it: what the pack holds is not pending."""
    left = set(moved.left)
    kept = [offset for offset in walk.pending if offset >= moved.end or offset in left]
    if walk.seen < moved.end:
        kept = sorted({*kept, *(offset for offset in left if offset >= walk.seen)})
        walk.seen = moved.end
    walk.pending = kept
    walk.settled = False
