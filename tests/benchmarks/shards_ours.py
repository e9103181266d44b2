"""hpcroll's own formats: level 0 as a worker writes it, and packs, read as a trainer reads them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcroll.config import RunConfig, ShardConfig
from hpcroll.contract import RolloutRef, SegmentTokens, Trajectory, TrajectoryRecord, canonical_json
from hpcroll.fs import RunPaths, claim_name, make_directories, publish
from hpcroll.shards import RecordAddress, ShardWriter, StoredTrajectory, open_run
from hpcroll.shards.format.frames import FrameKind, open_frame
from hpcroll.shards.format.stored import RecordBytes
from hpcroll.shards.level1.packer import Packer, PackOptions
from hpcroll.shards.level1.retention import Retention
from tests.benchmarks.shards_formats import LEVEL, Reader
from tests.benchmarks.shards_rawset import RawSet, Row

INCARNATION = "w0"
_SYNCED = 8
"""Records that share an fsync."""
_DECODED = 64
"""Trajectories made at a time, between the stretches that are timed."""


class BenchRun:
    """A run directory that one incarnation commits to, without a spool."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root)
        self.leg = RunConfig().leg_names[-1]

    @classmethod
    def create(cls, root: Path) -> BenchRun:
        run = cls(root)
        make_directories(list(run.paths.directories()))
        config = RunConfig().model_dump(mode="json")
        record = {"schema_version": "1.0", "run_id": "bench", "config": config}
        publish(run.paths.run_json, canonical_json(record).encode())
        return run

    def writer(self, **config: Any) -> ShardWriter:
        publish(self.paths.worker_file(INCARNATION), json.dumps({"incarnation": INCARNATION}).encode())
        return ShardWriter(self.paths, INCARNATION, ShardConfig(**config))

    def confirm(self, ref: RolloutRef) -> None:
        """Links `done`."""
        make_directories([self.paths.done_directory(self.leg, ref)])
        claim_name(self.paths.worker_file(INCARNATION), self.paths.done_link(self.leg, ref))

    def close(self) -> None:
        """The incarnation is gone and nothing more will come."""
        publish(self.paths.ended_file(INCARNATION), json.dumps({"incarnation": INCARNATION}).encode())
        publish(self.paths.closed, b"{}")


class Level0:
    """Shards as a worker writes them: one record each, fsynced by eights, marked."""

    def __init__(self, *, dictionary: bool) -> None:
        self.name = "hpcroll level 0" + ", dictionaries" * dictionary
        self._dictionary = "auto" if dictionary else "off"
        self.durable_s: list[float] = []
        """From each append until its fsync was through."""
        self.write_s = 0.0

    def write(self, rows: RawSet, folder: Path) -> None:
        """`write_s` leaves out what turns the rows into trajectories, and the spool's names."""
        run = BenchRun.create(folder / "run")
        self.write_s, self.durable_s = 0.0, []
        with run.writer(level=LEVEL, dictionary=self._dictionary) as writer:
            for start in range(0, len(rows), _DECODED):
                made = [trajectory_of(rows[n]) for n in range(start, min(start + _DECODED, len(rows)))]
                for first in range(0, len(made), _SYNCED):
                    self._commit(run, writer, made[first : first + _SYNCED])
            closing_s = time.perf_counter()
        self.write_s += time.perf_counter() - closing_s
        run.close()

    def open(self, folder: Path, keys: Sequence[str]) -> Reader:
        return _OurReader(folder / "run", keys)

    def _commit(self, run: BenchRun, writer: ShardWriter, batch: Sequence[Trajectory]) -> None:
        began_s, addresses = [time.perf_counter()], list[RecordAddress]()
        for trajectory in batch:
            addresses.append(writer.append(trajectory))
            began_s.append(time.perf_counter())
        writer.sync()
        synced_s = time.perf_counter()
        self.durable_s += [synced_s - each for each in began_s[:-1]]
        for address in addresses:
            run.confirm(address.ref)
        confirmed_s = time.perf_counter()
        writer.mark(addresses)
        self.write_s += synced_s - began_s[0] + time.perf_counter() - confirmed_s


class Packed:
    """Packs of a run whose shards are deleted; `write_s` is that of the packer, which reads the shards."""

    def __init__(self, *, float16: bool = False, level: int = LEVEL) -> None:
        shown = "" if level == LEVEL else f", zstd {level}"
        self.name = f"hpcroll packed {'float16' if float16 else 'float32'}{shown}"
        self._options = PackOptions(level=level, float16=float16)
        self.write_s = 0.0

    def write(self, rows: RawSet, folder: Path) -> None:
        Level0(dictionary=False).write(rows, folder)
        paths = RunPaths(folder / "run")
        began_s = time.perf_counter()
        report = Packer(paths, self._options).pack()
        self.write_s = time.perf_counter() - began_s
        if sum(made.rows for made in report.packs) != len(rows):
            raise SystemExit(f"{self.name}: the packer left rollouts out: {report}")
        retained = Retention(paths).retain()
        if retained.problems or any(paths.shards.glob("*.shard")):
            raise SystemExit(f"{self.name}: shards were not deleted: {retained}")

    def open(self, folder: Path, keys: Sequence[str]) -> Reader:
        return _OurReader(folder / "run", keys)


class _OurReader:
    """The public reader of a run."""

    def __init__(self, path: Path, keys: Sequence[str]) -> None:
        self._path = path
        self._keys = keys
        self._whole = self._reader = open_run(path)

    def rows(self, *, record: bool) -> Iterator[Row]:
        self._reader = open_run(self._path, columns=None if record else ("tokens",))
        return (row_of(stored, record=record) for stored in self._reader)

    def one(self, index: int) -> Row:
        return row_of(self._whole.get(self._keys[index]), record=True)

    @property
    def noticed(self) -> int:
        """Damage that the latest pass met and counted."""
        return self._reader.counts.corrupt + self._reader.counts.committed_lost

    def close(self) -> None:
        pass


def trajectory_of(row: Row) -> Trajectory:
    """The trajectory that the row was made of, as a record of `INCARNATION`."""
    record = TrajectoryRecord.from_json(row.record).model_copy(update={"incarnation": INCARNATION})
    tokens, start = [], 0
    for segment in record.segments:
        own = slice(start, start := start + segment.length)
        tokens.append(SegmentTokens(row.ids[own], row.sampled[own], row.loss_mask[own], row.logprobs[own]))
    return Trajectory(record, tuple(tokens))


def row_of(stored: StoredTrajectory, *, record: bool) -> Row:
    """What was read, like the rows of the peers: the record stays JSON."""
    parts = stored.tokens
    if len(parts) == 1:
        arrays = {name: getattr(parts[0], name) for name in SegmentTokens.__dataclass_fields__}
    else:
        arrays = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in SegmentTokens.__dataclass_fields__
        }
    text = b"".join(_json_of(stored)) if record else b""
    reward = float("nan") if stored.reward is None else stored.reward
    return Row(**arrays, reward=reward, record=text, key=stored.rollout_id)


def _json_of(stored: StoredTrajectory) -> Iterator[bytes]:
    source: Any = stored.source
    for kind in (FrameKind.RECORD, FrameKind.TEXT):
        if isinstance(source, RecordBytes):
            yield open_frame(source.header, kind, source.data)
        else:
            yield source._require(kind)
