"""The plan of a step: an immutable file that rank 0 publishes and every rank reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
import zstandard

from hpcroll.contract import canonical_json
from hpcroll.errors import SchemaVersionError, ShardCorruptError
from hpcroll.fs.atomic import make_directories, publish, read_fresh
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.reading.balance import Layout
from hpcroll.shards.reading.rows import GroupStats, Row, rows_from_json, rows_to_json
from hpcroll.shards.reading.step import StepCounts, StepVersions

_FORMAT = 1
_COMPRESS_FROM_BYTES = 4096
_MOST_BYTES = 1 << 30
"""No plan is larger when decompressed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank does in step `number`, and the reader's state after it.

    A plan with an `end` holds no rows: the stream ended before the step, because the run is `closed`, or
    because rank 0 was `stopped`.
    """

    number: int
    rows: tuple[Row, ...]
    layout: Layout
    counts: StepCounts
    versions: StepVersions
    state: Mapping[str, Any]
    end: str | None = None

    @property
    def groups(self) -> tuple[GroupStats, ...]:
        return tuple(dict.fromkeys(row.group for row in self.rows))

    def to_bytes(self) -> bytes:
        """Canonical JSON with a checksum, compressed where it is long."""
        content = {
            "format": _FORMAT,
            "step": self.number,
            "rows": rows_to_json(self.rows),
            "layout": self.layout,
            "counts": asdict(self.counts),
            "versions": asdict(self.versions),
            "state": self.state,
            "end": self.end,
        }
        text = canonical_json(content)
        data = f'{{"plan":{text},"xxh3_64":"{xxhash.xxh3_64_hexdigest(text.encode())}"}}'.encode()
        return data if len(data) < _COMPRESS_FROM_BYTES else zstandard.ZstdCompressor().compress(data)

    @classmethod
    def from_bytes(cls, data: bytes, *, path: Path) -> Plan:
        """The inverse of `to_bytes`; raises `ShardCorruptError`, or `SchemaVersionError` for a newer one."""
        try:
            if data[:4] == zstandard.FRAME_HEADER:
                data = zstandard.ZstdDecompressor().decompress(data, max_output_size=_MOST_BYTES)
            wrapped = json.loads(data)
            content = wrapped["plan"]
            if wrapped["xxh3_64"] != xxhash.xxh3_64_hexdigest(canonical_json(content).encode()):
                raise ValueError("its checksum does not match")
            if content["format"] != _FORMAT:
                raise SchemaVersionError(
                    f"{path} has plan format {content['format']}, this hpcroll reads {_FORMAT}; run every "
                    "rank with the same hpcroll"
                )
            return cls(
                number=content["step"],
                rows=tuple(rows_from_json(content["rows"])),
                layout=tuple(tuple(tuple(rows) for rows in batches) for batches in content["layout"]),
                counts=StepCounts(**content["counts"]),
                versions=StepVersions(**content["versions"]),
                state=content["state"],
                end=content["end"],
            )
        except (ValueError, KeyError, TypeError, zstandard.ZstdError) as error:
            raise ShardCorruptError(
                f"{path} is no plan, or was damaged ({error}); restart the trainer from a state that was "
                "saved after that step, or under another trainer name"
            ) from error


@dataclass(frozen=True, slots=True)
class PlanFiles:
    """The plans of one branch of a trainer: a chain of names, each created once."""

    paths: RunPaths
    trainer: str
    branch: str

    def path(self, number: int) -> Path:
        return self.paths.plan_file(self.trainer, self.branch, number)

    def read(self, number: int) -> Plan | None:
        """The plan of step `number`; None while there is none, as far as can be seen from here."""
        path = self.path(number)
        data = read_fresh(path)
        return None if data is None else Plan.from_bytes(data, path=path)

    def publish(self, plan: Plan) -> Plan:
        """The plan of that step: `plan`, or the one that somebody published before."""
        path = self.path(plan.number)
        if not path.parent.is_dir():
            make_directories([path.parent])
        if publish(path, plan.to_bytes()):
            return plan
        published = self.read(plan.number)
        if published is None:
            raise ShardCorruptError(f"{path} exists and cannot be read; check the file system")
        return published


def branch_name(settings: Mapping[str, Any], number: int, state: Mapping[str, Any]) -> str:
    """The branch of plans that go on from `state`, after step `number`, under `settings`.

    Whoever starts from the same point in the same way gets the same name, hence the same plans.
    """
    return xxhash.xxh3_64_hexdigest(canonical_json([settings, number, state]).encode())
