"""A run is created once, with one config, and says what it is."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcroll.errors import (
    ConfigError,
    CorruptRecordError,
    SchemaVersionError,
    SpoolError,
    UnsafeFilesystemError,
)
from hpcroll.spool import Spool
from tests.spools import TWO_LEGS, make_config, make_spool


def test_created_run_is_opened_with_its_config_and_probe(tmp_path: Path) -> None:
    created = make_spool(tmp_path / "run", legs=TWO_LEGS)
    opened = Spool.open(tmp_path / "run")
    assert opened.config == created.config
    assert opened.config.leg_names == ("init+run", "eval")
    assert opened.run_id == created.run_id
    assert opened.created_at == created.created_at
    assert opened.record.filesystem.claims == "link"


def test_same_config_again_opens_the_run(tmp_path: Path) -> None:
    assert make_spool(tmp_path).run_id == make_spool(tmp_path).run_id


def test_other_config_is_refused_and_every_way_out_named(tmp_path: Path) -> None:
    make_spool(tmp_path)
    with pytest.raises(ConfigError, match=r"differs in: lease") as caught:
        make_spool(tmp_path, silence_s=99.0)
    for way_out in ("without a config", "it was created with", "another directory", "move the old run away"):
        assert way_out in str(caught.value)


def test_many_creators_make_one_run(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        spools = list(pool.map(lambda _: make_spool(tmp_path / "run"), range(8)))
    assert len({spool.run_id for spool in spools}) == 1


def test_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match=r"holds no run \(no run\.json\)"):
        Spool.open(tmp_path)


def test_unsafe_file_system_gets_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: Path) -> None:
        raise UnsafeFilesystemError(f"{directory} has no links")

    monkeypatch.setattr("hpcroll.spool.spool.probe_filesystem", refuse)
    with pytest.raises(UnsafeFilesystemError):
        make_spool(tmp_path)
    assert not (tmp_path / "run.json").exists()


def test_path_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be created"):
        Spool.create(tmp_path / "file" / "run", make_config())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere: needs an unprivileged user")
def test_parent_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="choose one that you may write"):
        make_spool(tmp_path / "run")


def test_damaged_run_json_is_refused(tmp_path: Path) -> None:
    make_spool(tmp_path)
    (tmp_path / "run.json").write_bytes(b"{")
    with pytest.raises(CorruptRecordError, match=r"run\.json"):
        Spool.open(tmp_path)


def test_edited_config_is_refused(tmp_path: Path) -> None:
    make_spool(tmp_path)
    record = json.loads((tmp_path / "run.json").read_bytes())
    record["config"]["lease"]["silence_s"] = 1234.0
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(CorruptRecordError, match="does not match its digest"):
        Spool.open(tmp_path)


def test_run_of_a_newer_hpcroll_is_refused_by_version(tmp_path: Path) -> None:
    make_spool(tmp_path)
    record = json.loads((tmp_path / "run.json").read_bytes())
    (tmp_path / "run.json").write_text(json.dumps({**record, "schema_version": "2.0"}))
    with pytest.raises(SchemaVersionError, match=r"RunRecord has schema version 2\.0"):
        Spool.open(tmp_path)
