"""Trajectory shards: the worker's writer and the trainer's reader."""

from hpcroll.shards.format.codec import Summary, decode_trajectory, encode_trajectory
from hpcroll.shards.format.commit_log import RecordAddress
from hpcroll.shards.format.stored import Column, StoredTrajectory
from hpcroll.shards.level0.adoption import adopt
from hpcroll.shards.level0.dictionary_keeper import check_dictionary
from hpcroll.shards.level0.writer import PreparedRecord, ShardWriter
from hpcroll.shards.reading.batches import Batch, PaddedBatch
from hpcroll.shards.reading.groups import Group
from hpcroll.shards.reading.reader import RunReader, open_run
from hpcroll.shards.reading.rows import GroupStats
from hpcroll.shards.reading.step import Step, StepCounts, StepVersions
from hpcroll.shards.verify import VerifyReport, verify_run

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
