"""Rank 0 is killed at any moment and started again: no group is lost or repeated, rank 1 never notices."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

from hpcroll.fs import publish
from hpcroll.shards import open_run
from hpcroll.shards.level1.packer import Packer
from hpcroll.shards.level1.retention import Retention
from tests.shard_runs import SEGMENT, ShardRun

GROUPS = 40
USABLE: dict[str, Any] = {"trainable": True, "not_trainable_because": ()}
RANK_0 = textwrap.dedent(
    """
    import json, sys
    from pathlib import Path
    from hpcroll.fs.atomic import replace
    from hpcroll.shards import open_run
    root, state = Path(sys.argv[1]), Path(sys.argv[2])
    reader = open_run(root).follow(trainer="grpo", rank=0, world=2, poll_s=0.01)
    if state.exists():
        reader.load_state_dict(json.loads(state.read_text()))
    for step in reader.steps(groups=2, max_tokens=4000):
        told = [[str(name) for name in batch.rollout_id] for batch in step.batches]
        print(json.dumps([step.number, [group.group_id for group in step.groups], told]), flush=True)
        replace(state, json.dumps(reader.state_dict()).encode())
    print("end", flush=True)
    """
)


def test_rank_0_killed_at_random_moments_repeats_and_loses_nothing(tmp_path: Path) -> None:
    chance = random.Random(11)
    run = ShardRun.create(tmp_path / "run")
    killed = threading.Semaphore(0)

    def commit_and_pack() -> None:
        for worker in range(4):
            assert worker == 0 or killed.acquire(timeout=120)
            first = worker * GROUPS // 4
            with run.writer(f"w{worker}") as writer:
                for group in range(first, first + GROUPS // 4):
                    run.commit(writer, f"w{worker}", range(4 * group, 4 * group + 4), **USABLE)
                    time.sleep(0.05)  # the pace of a run, not a wait
            run.end(f"w{worker}")
            Packer(run.paths).pack()
            Retention(run.paths).retain(without=["grpo"])
        publish(run.paths.closed, b"{}")

    other: list[tuple[int, list[str]]] = []

    def follow_on_rank_1() -> None:
        reader = open_run(run.paths.root).follow(trainer="grpo", rank=1, world=2, poll_s=0.01)
        for step in reader.steps(groups=2, max_tokens=4000, timeout_s=120):
            other.append((step.number, [group.group_id for group in step.groups]))

    threads = [threading.Thread(target=work) for work in (commit_and_pack, follow_on_rank_1)]
    for thread in threads:
        thread.start()
    printed: list[str] = []
    kills = 0
    while not printed or printed[-1] != "end":
        command = [sys.executable, "-c", RANK_0, str(run.paths.root), str(tmp_path / "state")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
            try:
                patience_s = 1.0 + chance.random() if kills < 6 else 120
                rank.wait(patience_s)
            except subprocess.TimeoutExpired:
                rank.kill()
                kills += 1
                killed.release()
            assert rank.stdout is not None
            printed += [line for line in rank.stdout.read().splitlines() if line]
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert kills >= 3
    steps: dict[int, str] = {}
    for line in printed:
        if line.startswith("["):
            number = int(line[1 : line.index(",")])
            assert steps.setdefault(number, line) == line, "a step that was taken twice was the same"
    assert [number for number, _ in other] == sorted(steps) == list(range(1, GROUPS // 2 + 1))
    delivered = [group for _, groups in other for group in groups]
    assert sorted(delivered) == sorted(f"{SEGMENT}/g{n}" for n in range(GROUPS))
