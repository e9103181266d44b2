"""Trajectory shards: the worker's writer and the trainer's reader."""

from hpcroll.shards.adoption import adopt
from hpcroll.shards.codec import Summary, decode_trajectory, encode_trajectory
from hpcroll.shards.commit_log import RecordAddress
from hpcroll.shards.groups import Group
from hpcroll.shards.packing import Batch
from hpcroll.shards.reader import RunReader, open_run
from hpcroll.shards.stored import Column, StoredTrajectory
from hpcroll.shards.verify import VerifyReport, verify_run
from hpcroll.shards.writer import ShardWriter

__all__ = [
    "Batch",
    "Column",
    "Group",
    "RecordAddress",
    "RunReader",
    "ShardWriter",
    "StoredTrajectory",
    "Summary",
    "VerifyReport",
    "adopt",
    "decode_trajectory",
    "encode_trajectory",
    "open_run",
    "verify_run",
]
