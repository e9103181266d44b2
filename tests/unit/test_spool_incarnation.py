"""An incarnation's file says who it is; its copies are the same token."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcroll.errors import CorruptRecordError
from hpcroll.fs import read_token
from hpcroll.spool import Incarnation, Spool, WorkerEnd, mark_ended, read_worker, read_workers
from hpcroll.spool import incarnation as incarnation_module
from tests.spools import make_spool

LEG = "init+run+eval"


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return make_spool(tmp_path)


def test_file_says_who_it_is(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    incarnation = Incarnation.register(spool, leg=LEG, rank=7)
    info = read_worker(spool.paths.worker_file(incarnation.id))
    assert info == incarnation.info
    assert (info.job_id, info.restart_count, info.rank, info.leg) == ("4711", 2, 7, LEG)
    assert (info.pid, info.run_id, info.role) == (os.getpid(), spool.run_id, "worker")
    assert len(info.token) == 32
    assert info.boot_id
    assert info.pid_namespace.startswith("pid:[")


def test_worker_outside_of_slurm_has_no_job(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert Incarnation.register(spool, leg=LEG, rank=0).job_id is None


def test_names_are_files_of_one_suffix_on_any_host(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node1.cluster.example/../x")
    assert "." not in Incarnation.register(spool, leg=LEG, rank=0).id


def test_token_is_followed_by_a_copy_before_it_has_too_many_links(
    spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incarnation_module, "LINKS_PER_TOKEN", 3)
    incarnation = Incarnation.register(spool, leg=LEG, rank=0)
    names = [tmp_path / f"name{n}" for n in range(10)]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(incarnation.claim, names))
    assert {read_token(name) for name in names} == {incarnation.id}
    assert max(name.stat().st_nlink for name in names) <= 4
    assert incarnation.claim(names[0]), "a name of an earlier copy is ours, too"
    assert [worker.info.incarnation for worker in read_workers(spool.paths)] == [incarnation.id]


def test_final_names_say_so_and_are_the_same_incarnation(spool: Spool, tmp_path: Path) -> None:
    incarnation = Incarnation.register(spool, leg=LEG, rank=0)
    assert incarnation.claim(tmp_path / "final", final=True)
    info = read_worker(tmp_path / "final")
    assert info is not None
    assert info.final
    assert info.incarnation == incarnation.id
    assert not incarnation.info.final


def test_first_word_on_an_end_stays(spool: Spool) -> None:
    incarnation = Incarnation.register(spool, leg=LEG, rank=0)
    mark_ended(spool.paths, incarnation.id, status=-9)
    mark_ended(spool.paths, incarnation.id, status=0)
    end = WorkerEnd.from_json(spool.paths.ended_file(incarnation.id).read_bytes())
    assert (end.incarnation, end.status) == (incarnation.id, -9)
    assert read_workers(spool.paths)[0].ended


def test_damaged_worker_file_is_reported(spool: Spool) -> None:
    incarnation = Incarnation.register(spool, leg=LEG, rank=0)
    path = spool.paths.worker_file(incarnation.id)
    path.write_bytes(b"{}")
    with pytest.raises(CorruptRecordError, match=str(path)):
        read_worker(path)
