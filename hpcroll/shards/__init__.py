"""Trajectory shards: the worker's writer and the trainer's reader."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpcroll.shards.format.codec import Summary, decode_trajectory, encode_trajectory
from hpcroll.shards.format.commit_log import RecordAddress
from hpcroll.shards.format.stored import Column, StoredTrajectory
from hpcroll.shards.reading.batches import Batch, PaddedBatch
from hpcroll.shards.reading.groups import Group
from hpcroll.shards.reading.reader import RunReader, open_run
from hpcroll.shards.reading.rows import GroupStats
from hpcroll.shards.reading.step import Step, StepCounts, StepVersions

if TYPE_CHECKING:
    from hpcroll.shards.level0.adoption import adopt
    from hpcroll.shards.level0.dictionary_keeper import check_dictionary
    from hpcroll.shards.level0.writer import PreparedRecord, ShardWriter
    from hpcroll.shards.verify import VerifyReport, verify_run

_NOT_FOR_TRAINERS = {
    "PreparedRecord": "level0.writer",
    "ShardWriter": "level0.writer",
    "VerifyReport": "verify",
    "adopt": "level0.adoption",
    "check_dictionary": "level0.dictionary_keeper",
    "verify_run": "verify",
}
"""Imported when first asked for."""


def __getattr__(name: str) -> Any:
    home = _NOT_FOR_TRAINERS.get(name)
    if home is None:
        raise AttributeError(f"module 'hpcroll.shards' has no attribute {name!r}")
    return getattr(import_module(f"hpcroll.shards.{home}"), name)


__all__ = [
    "Batch",
    "Column",
    "Group",
    "GroupStats",
    "PaddedBatch",
    "PreparedRecord",
    "RecordAddress",
    "RunReader",
    "ShardWriter",
    "Step",
    "StepCounts",
    "StepVersions",
    "StoredTrajectory",
    "Summary",
    "VerifyReport",
    "adopt",
    "check_dictionary",
    "decode_trajectory",
    "encode_trajectory",
    "open_run",
    "verify_run",
]
