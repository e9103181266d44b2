"""Results as they are committed, futures-like, from any process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcroll.contract import RolloutRef, Status, Trajectory
from hpcroll.shards import StoredTrajectory, open_run
from hpcroll.spool import Segment


@dataclass(frozen=True, slots=True)
class Result:
    """The committed result of one rollout; the trajectory is read when it is asked for."""

    run_dir: Path
    rollout_id: str
    group_id: str
    task_id: str
    sample_index: int
    attempt: int
    status: Status
    reward: float | None
    """None is not 0.0: it means that there is no reward."""
    reward_valid: bool
    trainable: bool

    def trajectory(self) -> Trajectory:
        """The whole trajectory; raises `ShardCorruptError` where its shard is damaged."""
        return open_run(self.run_dir).get(self.rollout_id).trajectory()


def iterate_results(run_dir: Path, segments: Sequence[Segment], *, wait: bool) -> Iterator[Result]:
    """Each committed result of `segments` once; with `wait`, until all have one or the run closes."""
    left = {segment.name: segment.size for segment in segments}
    reader = open_run(run_dir, columns=())
    if wait:
        reader = reader.follow(stop=lambda: not any(left.values()))
    for stored in reader if any(left.values()) else ():
        name = RolloutRef.parse(stored.rollout_id).segment
        if name in left:
            left[name] -= 1
            yield _result(run_dir, stored)
        if wait and not any(left.values()):
            return


def _result(run_dir: Path, stored: StoredTrajectory) -> Result:
    summary = stored.summary
    return Result(
        run_dir=run_dir,
        rollout_id=stored.rollout_id,
        group_id=summary.group_id,
        task_id=summary.task_id,
        sample_index=summary.sample_index,
        attempt=stored.attempt,
        status=stored.status,
        reward=summary.reward,
        reward_valid=summary.reward_valid,
        trainable=summary.trainable,
    )
