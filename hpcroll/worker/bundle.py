"""What one leg hands to the next: the drafted trajectory and the agent's artefacts, in one file.

    magic "HRB1" | xxh3-64 of the rest, little endian | zstd frame of
        uint32 header length | header (JSON) | trajectory record | artefacts, one after the other

The header names the schema version and the size of each part.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import xxhash
import zstandard

from hpcroll.contract import Trajectory, parse_version
from hpcroll.errors import CorruptRecordError, SchemaVersionError
from hpcroll.evaluators.base import Artefacts
from hpcroll.fs import publish
from hpcroll.shards import decode_trajectory, encode_trajectory
from hpcroll.spool import Claim, Spool

_MAGIC = b"HRB1"
_SCHEMA = "1.0"
_PREFIX = struct.Struct("<4sQ")
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A rollout between two legs."""

    draft: Trajectory
    artefacts: Artefacts


def write_bundle(path: Path, bundle: Bundle) -> None:
    """Writes the bundle; whole and durable on return, never half visible."""
    record = encode_trajectory(bundle.draft)
    header = {
        "schema_version": _SCHEMA,
        "record": len(record),
        "artefacts": [[name, len(data)] for name, data in bundle.artefacts.items()],
    }
    head = json.dumps(header).encode()
    body = b"".join([_LENGTH.pack(len(head)), head, record, *bundle.artefacts.values()])
    frame = zstandard.ZstdCompressor().compress(body)
    publish(path, _PREFIX.pack(_MAGIC, xxhash.xxh3_64_intdigest(frame)) + frame)


def handed_over(spool: Spool, claim: Claim) -> Bundle | None:
    """What the leg before left for `claim`; None in the first leg. Raises `OSError` or like `read_bundle`."""
    if claim.previous_attempt is None:
        return None
    legs = spool.config.leg_names
    before = legs[legs.index(claim.leg) - 1]
    return read_bundle(spool.paths.bundle_file(before, claim.rollout.ref, claim.previous_attempt))


def read_bundle(path: Path) -> Bundle:
    """The bundle at `path`; raises `CorruptRecordError` or `SchemaVersionError`."""
    data = path.read_bytes()
    if len(data) < _PREFIX.size:
        raise CorruptRecordError(f"bundle {path} is cut short ({len(data)} bytes)")
    magic, checksum = _PREFIX.unpack_from(data)
    frame = data[_PREFIX.size :]
    if magic != _MAGIC or xxhash.xxh3_64_intdigest(frame) != checksum:
        raise CorruptRecordError(f"bundle {path} is damaged: its checksum does not match")
    body = memoryview(zstandard.ZstdDecompressor().decompress(frame))
    start = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    header = json.loads(bytes(body[_LENGTH.size : start]))
    if parse_version(header["schema_version"])[0] > parse_version(_SCHEMA)[0]:
        raise SchemaVersionError(f"bundle {path} has schema version {header['schema_version']}")
    end = start + header["record"]
    draft = decode_trajectory(bytes(body[start:end]))
    artefacts = {}
    for name, size in header["artefacts"]:
        artefacts[name] = bytes(body[end : end + size])
        end += size
    return Bundle(draft, artefacts)
