"""run.json: what a run is, written once."""

from __future__ import annotations

from typing import ClassVar

from pydantic import ValidationError

from hpcroll.config import RunConfig
from hpcroll.contract import Record
from hpcroll.errors import ConfigError, CorruptRecordError, SpoolError
from hpcroll.fs import FilesystemProbe, RunPaths, read_fresh


class RunRecord(Record):
    """A run's identity, its resolved config and what its file system was found to do."""

    SCHEMA: ClassVar[str] = "1.0"

    run_id: str
    created_at: float
    """Unix seconds on the creator's node; for people."""
    config: RunConfig
    config_sha256: str
    filesystem: FilesystemProbe


def read_run(paths: RunPaths) -> RunRecord:
    """The record of the run at `paths`.

    Raises `SpoolError` where there is no run, `CorruptRecordError` where run.json is damaged, and
    `SchemaVersionError` where a newer hpcroll wrote it.
    """
    data = read_fresh(paths.run_json)
    if data is None:
        raise SpoolError(
            f"{paths.root} holds no run (no run.json); create one with Run.create, or check the path"
        )
    try:
        record = RunRecord.from_json(data)
    except ValidationError as error:
        raise CorruptRecordError(f"{paths.run_json} is damaged or was edited: {error}") from error
    if record.config.digest() != record.config_sha256:
        raise CorruptRecordError(
            f"{paths.run_json}: the config does not match its digest {record.config_sha256[:12]}; a run's "
            "config is fixed when it is created, so put the file back or create another run"
        )
    return record


def require_same_config(record: RunRecord, config: RunConfig, paths: RunPaths) -> None:
    """Raises `ConfigError`, which names what differs and every way out, unless the configs are the same."""
    if record.config_sha256 == config.digest():
        return
    differing = sorted(
        name for name in RunConfig.model_fields if getattr(record.config, name) != getattr(config, name)
    )
    raise ConfigError(
        f"{paths.root} holds run {record.run_id} with another config (differs in: {', '.join(differing)}). "
        "Open that run without a config, give the config it was created with, choose another directory, or "
        "move the old run away"
    )
