"""Trajectory shards: the worker's writer and the trainer's reader."""

from hpcroll.shards.codec import Summary, decode_trajectory, encode_trajectory
from hpcroll.shards.commit_log import RecordAddress
from hpcroll.shards.writer import ShardWriter

__all__ = ["RecordAddress", "ShardWriter", "Summary", "decode_trajectory", "encode_trajectory"]
