"""Exports as the real consumers read them, each in its own environment: bit for bit what the shards hold.

`tests/setup/install-consumers` installs them; `docs/reference/exporters.md` says who reads what.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcroll.contract import Trajectory
from hpcroll.exporters import export_run
from hpcroll.shards import open_run
from hpcroll.testing.exporter_suite import sample_trajectories
from tests.capabilities import CONSUMERS, need
from tests.shard_runs import ShardRun

pytestmark = pytest.mark.full
SCRIPTS = Path(__file__).parents[1] / "consumers"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("consumers") / "run"
    run = ShardRun.create(root)
    with run.writer("worker-a") as writer:
        addresses = [writer.append(trajectory) for trajectory in sample_trajectories()]
        writer.sync()
        writer.mark([a for a in addresses if run.confirm(a.ref.ordinal, "worker-a")])
    return root


def read(consumer: str, script: str, *arguments: object, home: Path) -> list[Any]:
    """What a script printed, one JSON value a line; it runs in the consumer's environment, offline."""
    need(f"consumer:{consumer}")
    argv = [str(CONSUMERS / consumer / "bin" / "python"), str(SCRIPTS / script), *map(str, arguments)]
    environment = {
        "HOME": str(home),
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        # A copied interpreter looks for its library where it was built.
        "LD_LIBRARY_PATH": ":".join(str(path) for path in CONSUMERS.glob("python-*/lib")),
    }
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500, env=environment, cwd=home)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


def trained_rows(run_dir: Path) -> list[tuple[Trajectory, int]]:
    usable = [stored.trajectory() for stored in open_run(run_dir) if stored.summary.usable]
    return [(t, i) for t in usable for i, arrays in enumerate(t.tokens) if arrays.loss_mask.any()]


def assert_same_rows(found: list[dict[str, Any]], wanted: list[tuple[Trajectory, int]]) -> None:
    """Each wanted row once: ids and mask equal, log-probabilities of trained tokens bit for bit."""
    by_key = {
        json.dumps([t.tokens[i].ids.tolist(), t.tokens[i].loss_mask.tolist()]): t.tokens[i] for t, i in wanted
    }
    assert sorted(json.dumps([row["ids"], row["mask"]]) for row in found) == sorted(by_key)
    for row in found:
        arrays = by_key[json.dumps([row["ids"], row["mask"]])]
        trained = arrays.loss_mask != 0
        assert np.array(row["logprobs"], np.float32)[trained].tobytes() == arrays.logprobs[trained].tobytes()


@pytest.mark.parametrize("to", ["verl", "skyrl", "areal", "nemo-rl", "slime"])
def test_trainers_hold_what_the_shards_hold(run_dir: Path, tmp_path: Path, to: str) -> None:
    export_run(run_dir, to, tmp_path / "out")
    found = read("trainers", "trainers_read.py", to, tmp_path / "out", home=tmp_path)
    assert_same_rows(found, trained_rows(run_dir))


def test_verl_finds_our_advantages_where_rollouts_have_one_row(run_dir: Path, tmp_path: Path) -> None:
    """Its own mean counts every row: equal to ours in groups without forks, and only there is it checked."""
    export_run(run_dir, "verl", tmp_path / "out")
    found = read("trainers", "trainers_read.py", "verl", tmp_path / "out", home=tmp_path)
    rows: dict[str, list[str]] = {}
    for trajectory, _ in trained_rows(run_dir):
        rows.setdefault(trajectory.record.group_id, []).append(trajectory.record.rollout_id)
    plain = {g for g, ids in rows.items() if len(ids) == len(set(ids)) > 1}
    checked = [row for row in found if row["group"] in plain]
    for row in checked:
        assert row["theirs"] == pytest.approx(row["ours"], abs=1e-6)
    assert all(np.isfinite(row["theirs"]) for row in found)


def test_trl_takes_an_export_to_a_loss_and_a_gradient(run_dir: Path, tmp_path: Path) -> None:
    export_run(run_dir, "trl", tmp_path / "out")
    (said,) = read("trainers", "trl_read.py", tmp_path / "out", home=tmp_path)
    wanted = trained_rows(run_dir)
    # A token at position 0 has no predecessor to be scored from; none is trained on here.
    assert said["rows"] == len(wanted)
    assert said["trained"] == sum(int(t.tokens[i].loss_mask.sum()) for t, i in wanted)
    total = sum(
        float(t.tokens[i].logprobs[t.tokens[i].loss_mask != 0].astype(np.float64).sum()) for t, i in wanted
    )
    assert said["old_log_probs"] == pytest.approx(total, rel=1e-9)
    assert np.isfinite(said["loss"])
    assert said["gradient"] > 0


def test_tables_open_in_polars_duckdb_and_datasets(run_dir: Path, tmp_path: Path) -> None:
    export_run(run_dir, "parquet", tmp_path / "out")
    (said,) = read("trainers", "tables_read.py", tmp_path / "out", home=tmp_path)
    trainable = [stored.trajectory() for stored in open_run(run_dir) if stored.trainable]
    arrays = [arrays for t in trainable for arrays in t.tokens]
    wanted = [len(arrays), sum(int(a.ids.sum()) for a in arrays), sum(int(a.loss_mask.sum()) for a in arrays)]
    assert said == {"polars": wanted, "duckdb": wanted, "datasets": wanted}


def test_nemo_gym_validates_every_line(run_dir: Path, tmp_path: Path) -> None:
    export_run(run_dir, "nemo-gym", tmp_path / "out")
    found = read("nemo_gym", "nemo_gym_read.py", tmp_path / "out", home=tmp_path)
    wanted = trained_rows(run_dir)
    assert len(found) == len(wanted)
    assert sum(sum(row["mask"]) for row in found) == sum(int(t.tokens[i].loss_mask.sum()) for t, i in wanted)
    assert sorted(row["reward"] for row in found) == sorted(t.record.reward or 0.0 for t, _ in wanted)


@pytest.mark.parametrize("prompt_ids", [False, True])
def test_harbor_validates_every_document(run_dir: Path, tmp_path: Path, prompt_ids: bool) -> None:
    export_run(run_dir, "atif", tmp_path / "out", options={"prompt_ids": prompt_ids})
    found = read("harbor", "harbor_read.py", tmp_path / "out", home=tmp_path)
    trajectories = [stored.trajectory() for stored in open_run(run_dir)]
    wanted = []
    for t in trajectories:
        for span in t.record.call_spans:
            where = slice(span.start, span.start + span.length)
            arrays = t.tokens[span.segment_index]
            said = [t.record.rollout_id, arrays.ids[where].tolist(), arrays.logprobs[where].tolist()]
            wanted.append(json.dumps(said))
    assert sorted(json.dumps(row) for row in found) == sorted(wanted)
