"""Packing while a run goes on, and the packer beside a worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcroll.config import RunConfig
from hpcroll.fs import publish
from hpcroll.shards.level1.chain import PackChain
from hpcroll.shards.level1.following import follow_packing
from hpcroll.shards.level1.packer import Packer, PackOptions
from hpcroll.shards.level1.retention import Retention
from hpcroll.spool import Spool
from hpcroll.worker.parent import packing_command
from tests.shard_runs import ShardRun


def spool(root: Path, **shards: Any) -> Spool:
    return Spool.create(
        root, RunConfig.model_validate({"shards": shards, "legs": [["init", "run"], ["eval"]]})
    )


def rows(run: ShardRun) -> int:
    chain = PackChain(run.paths)
    chain.refresh()
    return sum(manifest.rows for manifest in chain)


def test_following_packs_what_is_ready_and_ends_with_the_run(tmp_path: Path) -> None:
    run = ShardRun.create(tmp_path / "run")
    with run.writer("w0") as writer:
        rounds = follow_packing(run.paths, Packer(run.paths), retention=Retention(run.paths), poll_s=0.01)
        for ordinal in range(0, 12, 4):
            run.commit(writer, "w0", range(ordinal, ordinal + 4))
            made = next(rounds).packed.packs
            assert [pack.rows for pack in made] == [4]
        run.commit(writer, "w0", [12])
        assert next(rounds).packed.packs == []
    run.end("w0")
    publish(run.paths.closed, b"{}")
    last = list(rounds)[-1]
    assert rows(run) == 13
    assert last.retained is not None
    assert last.retained.deleted == ["w0.0"]


def test_nothing_is_packed_before_there_is_enough(tmp_path: Path) -> None:
    run = ShardRun.create(tmp_path / "run")
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(8))
        assert Packer(run.paths, PackOptions(min_mb=1)).pack().packs == []
        publish(run.paths.closed, b"{}")
        assert Packer(run.paths, PackOptions(min_mb=1)).pack().packs != []


@pytest.mark.parametrize(
    ("leg", "rank", "pack"), [("eval", 1, "auto"), ("init+run", 0, "auto"), ("eval", 0, "off")]
)
def test_only_the_last_legs_rank_0_packs_and_only_where_asked(
    tmp_path: Path, leg: str, rank: int, pack: str
) -> None:
    spool(tmp_path / "run", pack=pack)
    assert packing_command(tmp_path / "run", leg, rank) is None


def test_the_packer_beside_a_worker_packs_until_the_run_is_closed(tmp_path: Path) -> None:
    spool(tmp_path / "run", pack="auto", retain=True)
    run = ShardRun.open(tmp_path / "run", leg="eval")
    with run.writer("w0") as writer:
        run.commit(writer, "w0", range(8))
    run.end("w0")
    publish(run.paths.closed, b"{}")
    command = packing_command(tmp_path / "run", "eval", 0)
    assert command is not None
    assert command[0] == sys.executable
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    assert "rows=8 groups=2" in done.stdout
    assert "deleted: shard=w0.0" in done.stdout
    assert rows(run) == 8
