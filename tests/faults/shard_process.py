"""One of the processes that work on a run's shards at once:

    python -m tests.faults.shard_process ROLE RUN ...

    writer RUN INCARNATION NUMBER OF RATE     commits the rollouts n with n % OF == NUMBER, RATE a second
    packer RUN | retention RUN                until the run is closed
    plans RUN OUTPUT EVERY | groups RUN OUTPUT EVERY
                                              a follower: named, with plans; or anonymous

Writers pause once the file `logs/pause` is there, and end at the number in `logs/until`. A follower appends a
line of JSON after every EVERY groups, {"groups": [...], "state": ..., "figures": ...}, and goes on after its
last whole line.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcroll.contract import Trajectory
from hpcroll.fs import claim_name, make_directories
from hpcroll.shards import RunReader, open_run
from hpcroll.shards.level1.following import follow_packing
from hpcroll.shards.level1.packer import Packer
from hpcroll.shards.level1.retention import Retention
from tests.shard_runs import SEGMENT, ShardRun, ref, trajectory

GROUP_SIZE = 4
SHARD_BYTES = 64 << 10
POLL_S = 0.1


def templates() -> list[Trajectory]:
    """Trajectories that a trainer can use."""
    made = (trajectory(seed, turns=1) for seed in range(100))
    return [item for item in made if item.record.trainable][:8]


def record_of(ordinal: int, incarnation: str, like: list[Trajectory]) -> Trajectory:
    """The trajectory of rollout `ordinal`, whose ids say which it is."""
    template = like[ordinal % len(like)]
    names = {
        "rollout_id": f"{SEGMENT}/{ordinal}",
        "incarnation": incarnation,
        "group_id": f"{SEGMENT}/g{ordinal // GROUP_SIZE}",
        "group_size": GROUP_SIZE,
        "sample_index": ordinal % GROUP_SIZE,
        "task_id": f"task-{ordinal // GROUP_SIZE}",
    }
    return Trajectory(template.record.model_copy(update=names), template.tokens)


def write(run: ShardRun, incarnation: str, number: int, of: int, rate: float) -> None:
    like, made = templates(), set()
    pause, until = run.paths.logs / "pause", run.paths.logs / "until"
    with run.writer(incarnation) as writer:
        writer._most_bytes = SHARD_BYTES
        ordinal, begun = number, time.monotonic()
        while not until.exists() or ordinal < int(until.read_text()):
            if pause.exists() and not until.exists():
                print("paused", flush=True)
                while not until.exists():
                    time.sleep(0.02)
                continue
            done = run.paths.done_link(run.leg, ref(ordinal))
            directory = done.parent
            if directory not in made:
                make_directories([directory])
                made.add(directory)
            if not done.exists():
                address = writer.append(record_of(ordinal, incarnation, like))
                writer.sync()
                if claim_name(run.paths.worker_file(incarnation), done):
                    writer.mark([address])
                begun += 1 / rate
                time.sleep(max(0.0, begun - time.monotonic()))  # the rate, nothing else
            ordinal += of


def pack(run: ShardRun) -> None:
    for done in follow_packing(run.paths, Packer(run.paths), poll_s=0.5):
        for made in done.packed.packs:
            print("packed", made.generation, made.rows, flush=True)


def retain(run: ShardRun) -> None:
    retention = Retention(run.paths)
    while not run.paths.closed.exists():
        report = retention.retain()
        assert report.problems == [], report.problems
        for name in report.deleted:
            print("deleted", name, flush=True)
        time.sleep(0.3)


def follow(run: ShardRun, output: Path, every: int, *, plans: bool) -> None:
    reader = open_run(run.paths.root, columns=("tokens",)).follow(
        poll_s=POLL_S, trainer="planner" if plans else None
    )
    state = last_state(output)
    if state is not None:
        reader.load_state_dict(state)
    begun, waiting, most_files, sums = time.monotonic(), [], 0, {"opens": 0, "listings": 0}
    with output.open("ab", buffering=0) as lines:
        deliveries = _steps(reader) if plans else _groups(reader)
        for groups in _with_an_end(deliveries):
            waiting += groups or []
            if waiting and (groups is None or len(waiting) >= every):
                most_files = max(most_files, len(os.listdir("/proc/self/fd")))  # noqa: PTH208
                sums = {"opens": reader.counts.opens, "listings": reader.counts.listings}
                figures = {"rss_kb": _rss_kb(), "files": most_files, "s": time.monotonic() - begun, **sums}
                line = {"groups": waiting, "state": reader.state_dict(), "figures": figures}
                lines.write(json.dumps(line).encode() + b"\n")
                os.fsync(lines.fileno())
                waiting = []


def last_state(output: Path) -> dict[str, Any] | None:
    """The state in the last whole line; what a kill cut short is removed."""
    data = output.read_bytes() if output.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(output, len(whole))
    state: dict[str, Any] | None = json.loads(whole.splitlines()[-1])["state"] if whole else None
    return state


def _steps(reader: RunReader) -> Iterator[list[str]]:
    for step in reader.steps(groups=2, max_tokens=1 << 16):
        assert sum(int(batch.loss_mask.sum()) for batch in step.batches) > 0
        yield [group.group_id for group in step.groups]


def _groups(reader: RunReader) -> Iterator[list[str]]:
    for group in reader.groups():
        assert all(int(arrays.ids.sum()) for member in group.members for arrays in member.tokens)
        yield [group.group_id]


def _with_an_end(deliveries: Iterator[list[str]]) -> Iterator[list[str] | None]:
    yield from deliveries
    yield None


def _rss_kb() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 1024


def main() -> None:
    role, root, *rest = sys.argv[1:]
    run = ShardRun.open(Path(root))
    if role == "writer":
        write(run, rest[0], int(rest[1]), int(rest[2]), float(rest[3]))
    elif role == "packer":
        pack(run)
    elif role == "retention":
        retain(run)
    else:
        follow(run, Path(rest[0]), int(rest[1]), plans=role == "plans")


if __name__ == "__main__":
    main()
