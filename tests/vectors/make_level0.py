"""Makes the level-0 vectors from records.json: `python -m tests.vectors.make_level0` rewrites the files.

It joins frames itself, so that the bytes stay the same when hpcroll compresses otherwise.
The bytes are those of the committed files where zstd is of the version that ZSTD_VERSION names.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

from hpcroll.contract import Ragged, RolloutRef
from hpcroll.shards.format.columns import column_frames
from hpcroll.shards.format.commit_log import RecordAddress, pack_mark
from hpcroll.shards.format.dictionaries import Dictionary, pack_dictionaries, parse_dictionaries
from hpcroll.shards.format.dictionary_training import train
from hpcroll.shards.format.frames import FrameKind, parse_header
from hpcroll.shards.format.summary import Summary, pack_summary
from tests.vectors.level0_reader import read_dictionaries, read_log, read_shard

HERE = Path(__file__).parent
LEVEL0 = HERE / "level0"
ZSTD_VERSION = "1.5.7"
LEVEL = 3
Content = dict[str, Any]


def contents() -> list[Content]:
    """The records that the vectors hold, as JSON."""
    found: list[Content] = json.loads((HERE / "records.json").read_text())
    return found


def frames_of(content: Content) -> dict[int, bytes]:
    summary = {name: tuple(v) if isinstance(v, list) else v for name, v in content["summary"].items()}
    columns = {}
    for name, dtype in (("ids", "<u4"), ("sampled", "u1"), ("loss_mask", "u1"), ("logprobs", "<f4")):
        values = [value for part in content["tokens"] for value in part[name]]
        columns[name] = np.array([np.nan if value is None else value for value in values], dtype)
    ids, sampled, loss_mask, logprobs = columns.values()
    bits = logprobs[sampled == 1].view("<u4")
    rotated = bits << 1 | bits >> 31
    exponents = zstandard.ZstdCompressor(level=LEVEL).compress((rotated >> 24).astype("u1").tobytes())
    return {
        FrameKind.SUMMARY: pack_summary(Summary(**summary)),
        FrameKind.TOKENS: b"".join(
            [
                (ids & 0xFFFF).astype("<u2").tobytes(),
                (ids >> 16).astype("u1" if ids.max(initial=0) < 1 << 24 else "<u2").tobytes(),
                sampled.tobytes(),
                loss_mask.tobytes(),
            ]
        ),
        FrameKind.LOGPROBS: b"".join(
            [
                struct.pack("<I", len(bits)),
                exponents,
                (rotated & 0xFFFF).astype("<u2").tobytes(),
                (rotated >> 16 & 0xFF).astype("u1").tobytes(),
            ]
        ),
        FrameKind.RECORD: _json(content["record"]),
        FrameKind.TEXT: _json(content["text"]),
    }


def record(
    content: Content, frames: dict[int, bytes], dictionaries: dict[int, Dictionary] | None = None
) -> bytes:
    ref, table, body = RolloutRef.parse(content["rollout_id"]), [], []
    for kind, raw in sorted(frames.items()):
        dictionary = (dictionaries or {}).get(kind)
        known = zstandard.ZstdCompressionDict(dictionary.content.as_bytes()) if dictionary else None
        stored = zstandard.ZstdCompressor(level=LEVEL, dict_data=known).compress(raw)
        number = dictionary.number if dictionary else 0
        if kind in (FrameKind.SUMMARY, FrameKind.LOGPROBS) or len(stored) >= len(raw):
            stored, number = raw, 0
        table.append(struct.pack("<IIQQQ", kind, number, len(stored), len(raw), _checksum(stored)))
        body.append(stored)
    segment = bytes.fromhex(ref.segment)
    body_bytes = sum(map(len, body))
    fixed = (1, 0, len(body), content["attempt"], segment, ref.ordinal, 0, body_bytes)
    head = b"".join([b"hpcroll", struct.pack("<BHHI8sIIQ", *fixed), *table])
    return b"".join([head, struct.pack("<Q", _checksum(head)), *body])


def plain() -> bytes:
    return b"".join(record(content, frames_of(content)) for content in contents())


def columns() -> bytes:
    """Optional columns of every shape, in a record of two segments and in one of none."""
    made = []
    for content in contents():
        lengths = content["summary"]["lengths"]
        extra = {
            "ref_logprobs": tuple(-np.arange(n, dtype="<f4") / 8 for n in lengths),
            "routed_experts": tuple(np.arange(n * 6, dtype="u1").reshape(n, 3, 2) for n in lengths),
            "kept_ids": tuple(
                Ragged(np.arange(n, dtype="<u4") % 3, np.arange((np.arange(n) % 3).sum(), dtype="<u2"))
                for n in lengths
            ),
        }
        made.append(record(content, frames_of(content) | column_frames(extra, lengths)))
    return b"".join(made)


def dictionary_file() -> bytes:
    """A trained dictionary for records, and plain bytes as one for texts; smaller than a run's would be."""
    samples = [frames_of(content) for content in contents()]
    trained = train([frames for frames in samples if frames[FrameKind.TOKENS]] * 6)
    return pack_dictionaries(
        {FrameKind.RECORD: trained[FrameKind.RECORD], FrameKind.TEXT: samples[0][FrameKind.TEXT]}
    )


def with_dictionaries() -> bytes:
    known = parse_dictionaries((LEVEL0 / "dictionary.dict").read_bytes(), LEVEL0 / "dictionary.dict")
    by_kind = {each.kind: each for each in known}
    return b"".join(record(content, frames_of(content), by_kind) for content in contents())


def newer_minor() -> bytes:
    """What a later version may add: a frame of a new kind, and fields at the end of the summary's parts."""
    made = []
    for content in contents():
        frames = frames_of(content)
        frames[FrameKind.SUMMARY] = _grown(frames[FrameKind.SUMMARY])
        frames[9] = b"a frame of a kind that is not known yet" * 4
        data = bytearray(record(content, frames))
        struct.pack_into("<H", data, 8, 7)
        struct.pack_into("<I", data, 28, 0xFFFFFFFF)  # the reserved field
        made.append(_sealed(data))
    return b"".join(made)


def newer_major() -> bytes:
    data = bytearray(record(contents()[0], frames_of(contents()[0])))
    data[7] = 2
    return _sealed(data)


def damaged() -> bytes:
    """Of four records, the first has a flipped bit in its text, the second in its tokens, the third in its
    header."""
    made = [bytearray(record(content, frames_of(content))) for content in contents()]
    for data, kind in zip(made, (FrameKind.TEXT, FrameKind.TOKENS), strict=False):
        header = parse_header(bytes(data))
        assert header is not None
        data[header.frame(kind).start + 5] ^= 0x10
    made[2][17] ^= 0x01
    return b"".join(made)


def torn() -> bytes:
    """The last record is cut short, as a kill leaves it."""
    return plain()[:-100]


def zeroed() -> bytes:
    """A tail whose size was written before its bytes, as a crash of a node leaves it."""
    return record(contents()[0], frames_of(contents()[0])) + bytes(500)


def log() -> bytes:
    """Marks of the records in plain.shard; the second is damaged, and the last one is being written."""
    data, at, marks = plain(), 0, []
    for content in contents():
        header = parse_header(data[at:])
        assert header is not None
        ref = RolloutRef.parse(content["rollout_id"])
        address = RecordAddress(0, at, header.record_bytes, ref, header.attempt, header.checksum)
        marks.append(bytearray(pack_mark(address)))
        at += header.record_bytes
    marks[1][20] ^= 0x80
    return b"".join(marks)[:-10]


SHARDS: dict[str, Callable[[], bytes]] = {
    "plain": plain,
    "columns": columns,
    "dictionary": with_dictionaries,
    "newer_minor": newer_minor,
    "newer_major": newer_major,
    "damaged": damaged,
    "torn": torn,
    "zeroed": zeroed,
}


def expected(name: str) -> Any:
    """What a reader must find in a vector, from the bytes that are committed."""
    if name == "log":
        return read_log((LEVEL0 / "log.log").read_bytes())
    known = read_dictionaries((LEVEL0 / "dictionary.dict").read_bytes()) if name == "dictionary" else {}
    return read_shard((LEVEL0 / f"{name}.shard").read_bytes(), known)


def main() -> None:
    LEVEL0.mkdir(exist_ok=True)
    if not (LEVEL0 / "dictionary.dict").exists():  # given: what training finds may change
        (LEVEL0 / "dictionary.dict").write_bytes(dictionary_file())
    (LEVEL0 / "log.log").write_bytes(log())
    for name, make in SHARDS.items():
        (LEVEL0 / f"{name}.shard").write_bytes(make())
    for name in (*SHARDS, "log"):
        text = json.dumps(expected(name), separators=(",", ":"), sort_keys=True)
        (LEVEL0 / f"{name}.json").write_text(text + "\n")


def _json(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def _checksum(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def _sealed(data: bytearray) -> bytes:
    """`data`, a record whose header was changed, with the header's checksum made anew."""
    (frames,) = struct.unpack_from("<H", data, 10)
    end = 40 + 32 * frames
    struct.pack_into("<Q", data, end, _checksum(bytes(data[:end])))
    return bytes(data)


def _grown(raw: bytes) -> bytes:
    fixed, per_segment, segments, strings = struct.unpack_from("<HHIH", raw)
    entries = [raw[fixed + per_segment * i : fixed + per_segment * (i + 1)] for i in range(segments)]
    at = fixed + per_segment * segments
    sizes, texts = raw[at : at + 4 * strings], raw[at + 4 * strings :]
    head = struct.pack("<HHIH", fixed + 8, per_segment + 4, segments, strings + 1) + raw[10:fixed]
    grown = [head, b"\1" * 8, *(entry + b"\2" * 4 for entry in entries)]
    return b"".join([*grown, sizes, struct.pack("<I", 5), texts, b"later"])


if __name__ == "__main__":
    main()
