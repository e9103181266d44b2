"""Runs for tests of shards: a real run directory, workers that commit what they are told, no spool."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcroll.config import RunConfig, ShardConfig
from hpcroll.contract import RolloutRef, Trajectory, canonical_json
from hpcroll.fs import RunPaths, claim_name, make_directories, publish
from hpcroll.shards import RecordAddress, ShardWriter
from hpcroll.testing.trajectories import random_trajectory

SEGMENT = "0123456789abcdef"


def ref(ordinal: int) -> RolloutRef:
    return RolloutRef(segment=SEGMENT, ordinal=ordinal)


@dataclass(frozen=True)
class ShardRun:
    """A run in `paths.root`; its rollouts are those of one manifest segment."""

    paths: RunPaths
    leg: str
    run_id: str = "run"

    @classmethod
    def create(cls, root: Path, *, legs: Sequence[Sequence[str]] = (("init", "run", "eval"),)) -> ShardRun:
        paths = RunPaths(root)
        config = RunConfig.model_validate({"legs": legs})
        make_directories(list(paths.directories()))
        record = {"schema_version": "1.0", "run_id": "run", "config": config.model_dump(mode="json")}
        publish(paths.run_json, canonical_json(record).encode())
        return cls.open(root, leg=config.leg_names[-1])

    @classmethod
    def open(cls, root: Path, *, leg: str = "init+run+eval") -> ShardRun:
        return cls(RunPaths(root), leg)

    def register(self, incarnation: str) -> None:
        """Writes the token file that the incarnation's names link to."""
        publish(self.paths.worker_file(incarnation), json.dumps({"incarnation": incarnation}).encode())

    def writer(self, incarnation: str, **config: Any) -> ShardWriter:
        self.register(incarnation)
        return ShardWriter(self.paths, incarnation, ShardConfig(**config))

    def confirm(self, ordinal: int, incarnation: str) -> bool:
        """Links `done`; False where another incarnation has it."""
        make_directories([self.paths.done_directory(self.leg, ref(ordinal))])
        return claim_name(self.paths.worker_file(incarnation), self.paths.done_link(self.leg, ref(ordinal)))

    def end(self, incarnation: str) -> None:
        """Says that the incarnation is gone, as its parent does."""
        publish(self.paths.ended_file(incarnation), json.dumps({"incarnation": incarnation}).encode())

    def commit(
        self,
        writer: ShardWriter,
        incarnation: str,
        ordinals: Iterable[int],
        *,
        mark: bool = True,
        **fields: Any,
    ) -> list[RecordAddress]:
        """Appends, syncs, confirms and marks, in the order that the worker keeps."""
        addresses = [
            writer.append(trajectory(ordinal, incarnation=incarnation, **fields)) for ordinal in ordinals
        ]
        writer.sync()
        won = [address for address in addresses if self.confirm(address.ref.ordinal, incarnation)]
        if mark:
            writer.mark(won)
        return addresses


def bulk(ordinal: int) -> dict[str, Any]:
    """Fields that make a record take about 60 kB of a shard, so that few fill one."""
    return {"turns": 1, "extra": {"bulk": random.Random(ordinal).randbytes(60_000).hex()}}


def trajectory(ordinal: int, *, incarnation: str = "w0", **fields: Any) -> Trajectory:
    """The trajectory of rollout `ordinal`; whoever compares makes the same one again."""
    return random_trajectory(ordinal, rollout_id=f"{SEGMENT}/{ordinal}", incarnation=incarnation, **fields)
