"""Retries: new submissions of tasks whose rollouts ended as failed.

A committed result is final, `failed` too, so that a retry is a submission of its own, `<key>+retry<k>`. It
makes whole new groups: a group that was completed by a lone later sample would mix policies.
"""

from __future__ import annotations

import re
from pathlib import Path

from hpcroll.contract import RolloutRef, Status, Task
from hpcroll.shards import open_run
from hpcroll.spool import Segment, Spool, Submission

_RETRY = re.compile(r"^(?P<base>.*)\+retry(?P<number>\d+)$", re.DOTALL)


def submit_retries(spool: Spool, run_dir: Path, segment: Segment | None) -> list[Submission]:
    """Submits again what failed in `segment` (None: in any) or in its latest retry, task by task.

    A task that a later retry holds already is judged by that retry alone, so that nothing is submitted
    twice for one failure.
    """
    failed = _failed_tasks(run_dir)
    wanted = None if segment is None else _base(segment.key)[0]
    submissions = []
    for base, chain in _chains(spool.segments()).items():
        if wanted is not None and base != wanted:
            continue
        tasks = _unsolved(chain, failed)
        if tasks:
            key = f"{base}+retry{_base(chain[-1].key)[1] + 1}"
            submissions.append(spool.submit(tasks, samples=chain[0].samples, key=key))
    return submissions


def _failed_tasks(run_dir: Path) -> set[tuple[str, int]]:
    """Segment and task index of every group with a failed rollout."""
    found = set()
    for stored in open_run(run_dir, columns=(), status=Status.FAILED):
        ref = RolloutRef.parse(stored.rollout_id)
        found.add((ref.segment, ref.ordinal // stored.summary.group_size))
    return found


def _chains(segments: tuple[Segment, ...]) -> dict[str, list[Segment]]:
    """Each submission with its retries, in the order of their numbers."""
    chains: dict[str, list[Segment]] = {}
    for segment in segments:
        chains.setdefault(_base(segment.key)[0], []).append(segment)
    return {base: sorted(chain, key=lambda item: _base(item.key)[1]) for base, chain in chains.items()}


def _unsolved(chain: list[Segment], failed: set[tuple[str, int]]) -> list[Task]:
    """The tasks whose group failed in the last submission of `chain` that holds them."""
    latest: dict[str, tuple[Segment, int]] = {}
    for segment in chain:
        for index in range(segment.header.tasks):
            latest[segment.task(index).task_id] = (segment, index)
    return [segment.task(index) for segment, index in latest.values() if (segment.name, index) in failed]


def _base(key: str) -> tuple[str, int]:
    match = _RETRY.match(key)
    return (key, 0) if match is None else (match["base"], int(match["number"]))
