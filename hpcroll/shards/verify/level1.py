"""Checks the packs: the chain, every byte and row, and that they agree with `done` and with level 0."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack

from hpcroll.contract import Trajectory
from hpcroll.errors import HpcrollError
from hpcroll.fs.atomic import list_names
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.codec import read_trajectory
from hpcroll.shards.format.place import Place, ShardName
from hpcroll.shards.format.run_facts import RunFacts
from hpcroll.shards.format.stored import ALL_COLUMNS
from hpcroll.shards.level0.shard_file import OpenShard, committer
from hpcroll.shards.level1.chain import Frontier, Manifest, PackChain
from hpcroll.shards.level1.pack_file import OpenPack
from hpcroll.shards.verify.records import broken_promises, differences
from hpcroll.shards.verify.report import VerifyReport

_OPEN_SHARDS = 32


class Level1Check:
    """Goes once through every pack."""

    def __init__(self, paths: RunPaths, facts: RunFacts, report: VerifyReport) -> None:
        self._paths = paths
        self._facts = facts
        self._report = report
        self.found: Counter[tuple[str, int]] = Counter()
        """Sound committed rows by rollout."""
        self.offsets: dict[ShardName, set[int]] = {}
        """The level-0 entries that rows came from."""
        self.chain = PackChain(paths)
        self.action_tokens: Counter[tuple[str, int]] = Counter()

    def run(self) -> None:
        try:
            self.chain.refresh()
        except HpcrollError as error:
            self._report.add(str(error))
        for path in self.chain.damaged:
            self._report.add(f"{path}: one of its two lines is damaged; write the sound one twice")
        self._report.packs = len(self.chain)
        self._check_names()
        frontier: dict[ShardName, Frontier] = {}
        with _Originals(self._paths) as originals:
            for manifest in self.chain:
                for problem in _broken_ranges(manifest, frontier):
                    self._report.add(f"{self._paths.pack_manifest(manifest.generation)}: {problem}")
                self._check_pack(manifest, frontier, originals)
                for name, moved in manifest.inputs.items():
                    frontier[name] = Frontier(moved.end, set(moved.left))

    def _check_names(self) -> None:
        """Data files that no manifest names are counted; a manifest beyond a gap is a problem."""
        known = {manifest.file for manifest in self.chain}
        for name in list_names(self._paths.packs):
            if name.isdecimal() and int(name) > len(self.chain):
                self._report.add(
                    f"{self._paths.packs / name}: no reader comes to this pack, because "
                    f"{self._paths.pack_manifest(len(self.chain))} is missing or damaged; restore that file"
                )
            elif not name.isdecimal() and name not in known:
                self._report.orphans += 1

    def _check_pack(
        self, manifest: Manifest, before: dict[ShardName, Frontier], originals: _Originals
    ) -> None:
        path = self.chain.data_file(manifest)
        try:
            opened = OpenPack(path, manifest)
        except (OSError, HpcrollError) as error:
            self._report.add(f"{path}: pack {manifest.generation} cannot be opened: {error}")
            return
        with opened as pack:
            for problem in pack.damage():
                self._report.add(problem)
            if len(pack) != manifest.rows:
                self._report.add(f"{path}: {len(pack)} rows can be read, its manifest says {manifest.rows}")
            for row in range(len(pack)):
                self._check_row(pack, row, manifest, before, originals)

    def _check_row(
        self,
        pack: OpenPack,
        row: int,
        manifest: Manifest,
        before: dict[ShardName, Frontier],
        originals: _Originals,
    ) -> None:
        ref, place = pack.ref(row), pack.place(row)
        where = f"{pack.path} row {row}: rollout {ref}"
        owner = committer(self._paths, self._facts.final_leg, ref)
        if owner != place.shard.incarnation:
            self._report.add(f"{where} is of {place.shard.incarnation}, `done` names {owner or 'nobody'}")
        if not _may_hold(manifest, before, place):
            self._report.add(f"{where}: its entry {place.shard}@{place.offset} is not among the inputs")
        if place.offset in self.offsets.setdefault(place.shard, set()):
            self._report.add(f"{where}: its entry {place.shard}@{place.offset} is packed twice")
        self.offsets[place.shard].add(place.offset)
        try:
            stored = pack.read(row, ALL_COLUMNS)
            trajectory = stored.trajectory()
        except HpcrollError as error:
            self._report.add(f"{where}: {error}")
            return
        except ValueError as error:  # sound bytes that are no record: a packer's fault, not the disk's
            self._report.add(f"{where} does not decode: {error}")
            return
        if owner == place.shard.incarnation:
            self._report.packed += 1
            self.found[ref.segment, ref.ordinal] += 1
            self.action_tokens[ref.segment, ref.ordinal] = trajectory.action_tokens
        for problem in broken_promises(
            self._facts, trajectory, ref=ref, attempt=stored.attempt, incarnation=place.shard.incarnation
        ):
            self._report.add(f"{where}: {problem}")
        original = originals.read(place)
        if original is not None:
            for problem in differences(original, trajectory):
                self._report.add(f"{where}: {problem}")


def _may_hold(manifest: Manifest, before: dict[ShardName, Frontier], place: Place) -> bool:
    """Whether the pack's inputs say that it holds the entry at `place`."""
    moved = manifest.inputs.get(place.shard)
    if moved is None or place.offset in moved.left:
        return False
    return place.offset < moved.end and not before.get(place.shard, Frontier()).holds(place.offset)


def _broken_ranges(manifest: Manifest, frontier: dict[ShardName, Frontier]) -> Iterator[str]:
    """What a manifest's inputs break, given the frontier that all before it left."""
    for name, moved in manifest.inputs.items():
        before = frontier.get(name, Frontier())
        if moved.start != before.seen or moved.end < moved.start:
            yield f"it goes from {moved.start} to {moved.end} in {name}, where packs stand at {before.seen}"
        wrong = [offset for offset in moved.left if offset >= moved.end or before.holds(offset)]
        if wrong:
            yield f"it leaves entries of {name} at {wrong[:5]}, which are packed before or beyond its end"


class _Originals:
    """Level-0 records of packed rows, where their shards still exist; some shards stay open."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._open: OrderedDict[ShardName, OpenShard | None] = OrderedDict()

    def __enter__(self) -> _Originals:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as closing:
            for shard in self._open.values():
                if shard is not None:
                    closing.enter_context(shard)
        self._open.clear()

    def read(self, place: Place) -> Trajectory | None:
        """The record at `place`; None where its shard is gone or its bytes are not as written, which the
        check of level 0 tells."""
        shard = self._shard(place.shard)
        header = None if shard is None else shard.header_at(place.offset)
        if shard is None or header is None:
            return None
        try:
            return read_trajectory(header, shard.read(place.offset, header.record_bytes))
        except (HpcrollError, ValueError):
            return None

    def _shard(self, name: ShardName) -> OpenShard | None:
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        if len(self._open) >= _OPEN_SHARDS:
            _, oldest = self._open.popitem(last=False)
            if oldest is not None:
                with oldest:
                    pass
        try:
            self._open[name] = OpenShard(self._paths, name)
        except FileNotFoundError:
            self._open[name] = None
        return self._open[name]
