"""The shards of a run as listings: files, and trajectories as JSON lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcroll.contract import Trajectory, canonical_json
from hpcroll.fs import RunPaths
from hpcroll.shards import StoredTrajectory, open_run
from hpcroll.shards.level1.chain import PackChain
from hpcroll.shards.level1.pack_file import OpenPack
from hpcroll.trajectory import RowStats, row_stats


def list_shard_files(run_dir: Path) -> list[dict[str, Any]]:
    """One row per shard file, with what of it is committed, and one per pack.

    What is on both levels, a reader takes once.
    """
    records: Counter[tuple[str, int]] = Counter()
    tokens: Counter[tuple[str, int]] = Counter()
    for stored in open_run(run_dir, columns=()):
        place = (stored.incarnation, stored.place.shard.index)
        records[place] += 1
        tokens[place] += sum(stored.summary.lengths)
    rows = []
    for path in sorted(RunPaths(run_dir).shards.glob("*.shard")):
        incarnation, _, index = path.stem.rpartition(".")
        place = (incarnation, int(index))
        rows.append(
            {
                "shard": path.name,
                "size_bytes": path.stat().st_size,
                "committed": records[place],
                "tokens": tokens[place],
            }
        )
    return rows + list(_packs(RunPaths(run_dir)))


def _packs(paths: RunPaths) -> Iterator[dict[str, Any]]:
    chain = PackChain(paths)
    chain.refresh()
    for manifest in chain:
        with OpenPack(chain.data_file(manifest), manifest) as pack:
            yield {
                "shard": manifest.file,
                "size_bytes": manifest.size_bytes,
                "committed": len(pack),
                "tokens": int(pack.rows.lengths.sum()),
            }


def trajectory_lines(
    run_dir: Path, *, status: str | None = None, trainable: bool = False, full: bool = False
) -> Iterator[str]:
    """Committed trajectories, one JSON text each: a summary, or with `full` the record without tokens."""
    reader = open_run(
        run_dir, columns=("text",) if full else (), status=status, trainable=True if trainable else None
    )
    for stored in reader:
        yield stored.record.to_json() if full else canonical_json(_summary(stored))


def row_listing(run_dir: Path, *, trainable: bool = False) -> dict[str, Any]:
    """What a trainer is given: `total` over the run's committed rollouts, and `rollouts`, a row for each."""
    total, rows = RowStats(), []
    reader = open_run(run_dir, columns=("tokens", "record"), trainable=True if trainable else None)
    for stored in reader:
        counts = row_stats(Trajectory(stored.record, stored.tokens))
        total += counts
        rows.append({"rollout_id": stored.rollout_id, "task_id": stored.summary.task_id, **counts.to_dict()})
    return {"total": total.to_dict(), "rollouts": rows}


def _summary(stored: StoredTrajectory) -> dict[str, Any]:
    summary = stored.summary
    return {
        "rollout_id": stored.rollout_id,
        "task_id": summary.task_id,
        "group_id": summary.group_id,
        "sample_index": summary.sample_index,
        "attempt": stored.attempt,
        "status": summary.status,
        "reward": summary.reward,
        "trainable": summary.trainable,
        "tokens": sum(summary.lengths),
        "versions": [summary.version_low, summary.version_high],
        "shard": str(stored.place.shard),
    }
