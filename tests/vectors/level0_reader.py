"""A reader of level-0 shards that owes nothing to hpcroll: written from docs/reference/shard-format.md.

It is what the vectors are checked with, and a start for whoever reads shards in another language.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import xxhash
import zstandard

MAJOR = 1
SUMMARY, TOKENS, LOGPROBS, RECORD, TEXT, COLUMNS, FIRST_COLUMN = 1, 2, 3, 4, 5, 6, 16


class NewerFormat(Exception):
    """A sound header of another major version."""


class Damaged(Exception):
    """Bytes that are not as they were written."""


class NoDictionary(Exception):
    """A frame names a dictionary that was not given."""


def read_dictionaries(data: bytes) -> dict[int, bytes]:
    """The dictionaries of a file `dict.<g>` by number."""
    body, (checksum,) = data[:-8], struct.unpack("<Q", data[-8:])
    if body[:7] != b"hpcrdic" or xxhash.xxh3_64_intdigest(body) != checksum:
        raise Damaged("dictionaries")
    if body[7] != MAJOR:
        raise NewerFormat(body[7])
    (count,) = struct.unpack_from("<I", body, 8)
    entries = [struct.unpack_from("<IIQ", body, 16 + 16 * index) for index in range(count)]
    ordered = zstandard.ZstdDecompressor().decompress(body[16 + 16 * count :])
    found, start = {}, 0
    for _, number, size in entries:
        found[number] = ordered[start : start + size]
        start += size
    return found


def read_header(data: bytes, at: int) -> dict[str, Any] | None:
    """The header at `at`; None where no sound one stands there."""
    if data[at : at + 7] != b"hpcroll" or len(data) < at + 40:
        return None
    major, minor, count, attempt = struct.unpack_from("<BHHI", data, at + 7)
    table_end = at + 40 + 32 * count
    if count > 64 or len(data) < table_end + 8:
        return None
    (checksum,) = struct.unpack_from("<Q", data, table_end)
    if xxhash.xxh3_64_intdigest(data[at:table_end]) != checksum:
        return None
    if major != MAJOR:
        raise NewerFormat(major)
    segment, ordinal, _, body = struct.unpack_from("<8sIIQ", data, at + 16)
    frames, start = {}, table_end + 8
    for index in range(count):
        kind, dictionary, stored, raw, digest = struct.unpack_from("<IIQQQ", data, at + 40 + 32 * index)
        frames[kind] = (dictionary, start, stored, raw, digest)
        start += stored
    return {
        "rollout_id": f"{segment.hex()}/{ordinal}",
        "attempt": attempt,
        "minor": minor,
        "frames": frames,
        "end": table_end + 8 + body,
        "checksum": checksum,
    }


def read_frame(data: bytes, header: dict[str, Any], kind: int, dictionaries: dict[int, bytes]) -> bytes:
    """The raw bytes of a frame."""
    dictionary, start, stored, raw, digest = header["frames"][kind]
    part = data[start : start + stored]
    if len(part) != stored or xxhash.xxh3_64_intdigest(part) != digest:
        raise Damaged(kind)
    if stored == raw:
        return part
    if dictionary and dictionary not in dictionaries:
        raise NoDictionary(dictionary)
    content = zstandard.ZstdCompressionDict(dictionaries[dictionary]) if dictionary else None
    return zstandard.ZstdDecompressor(dict_data=content).decompress(part, max_output_size=raw)


def read_summary(raw: bytes) -> dict[str, Any]:
    fixed, per_segment, segments, strings, flags, group_size, sample_index, reward, weight, run_s = (
        struct.unpack_from("<HHIHHIIddd", raw)
    )
    rows = [struct.unpack_from("<IIIdqq", raw, fixed + per_segment * i) for i in range(segments)]
    at = fixed + per_segment * segments
    sizes = struct.unpack_from(f"<{strings}I", raw, at)
    at += 4 * strings
    texts = []
    for size in sizes:
        texts.append(raw[at : at + size].decode("utf-8", "surrogatepass"))
        at += size
    names = ("incarnation", "group_id", "task_id", "status", "stop_reason", "policy_name", "lineage")
    columns = ("lengths", "sampled", "trained", "weights", "version_low", "version_high")
    return {
        **dict(zip(names, texts, strict=False)),
        **{name: [row[i] for row in rows] for i, name in enumerate(columns)},
        "group_size": group_size,
        "sample_index": sample_index,
        "trainable": bool(flags & 1),
        "reward_valid": bool(flags & 2),
        "reward": reward if flags & 4 else None,
        "rollout_weight": weight,
        "run_s": run_s if flags & 8 else None,
    }


def read_tokens(lengths: list[int], tokens: bytes, logprobs: bytes) -> list[dict[str, Any]]:
    total, found, start = sum(lengths), [], 0
    wide = len(tokens) > 5 * total
    low = np.frombuffer(tokens, "<u2", total).astype(np.uint32)
    high = np.frombuffer(tokens, "<u2" if wide else "u1", total, 2 * total).astype(np.uint32)
    masks = np.frombuffer(tokens, "u1", 2 * total, (4 if wide else 3) * total)
    ids, sampled, loss_mask = high << 16 | low, masks[:total], masks[total:]
    floats = read_logprobs(logprobs, sampled)
    for length in lengths:
        own = slice(start, start + length)
        found.append(
            {
                "ids": ids[own].tolist(),
                "sampled": sampled[own].tolist(),
                "loss_mask": loss_mask[own].tolist(),
                "logprobs": plain(floats[own]),
            }
        )
        start += length
    return found


def read_logprobs(raw: bytes, sampled: Any) -> Any:
    (count,) = struct.unpack_from("<I", raw)
    mantissas = len(raw) - 3 * count
    exponents = zstandard.ZstdDecompressor().decompress(raw[4:mantissas], max_output_size=count)
    bits = np.frombuffer(exponents, "u1").astype(np.uint32) << 24
    bits |= np.frombuffer(raw, "u1", count, mantissas + 2 * count).astype(np.uint32) << 16
    bits |= np.frombuffer(raw, "<u2", count, mantissas)
    values = (bits >> 1 | bits << 31).view(np.float32)
    if count == len(sampled):
        return values
    floats = np.full(len(sampled), np.nan, np.float32)
    floats[sampled == 1] = values
    return floats


def read_columns(data: bytes, header: dict[str, Any], dictionaries: dict[int, bytes]) -> dict[str, Any]:
    if COLUMNS not in header["frames"]:
        return {}
    found = {}
    for number, entry in enumerate(json.loads(read_frame(data, header, COLUMNS, dictionaries))):
        raw, at, arrays = read_frame(data, header, FIRST_COLUMN + number, dictionaries), 0, []
        for shape in entry["shapes"]:
            if entry["ragged"]:
                counts = np.frombuffer(raw, "<u4", shape[0], at)
                values = np.frombuffer(raw, entry["dtype"], shape[1], at + counts.nbytes)
                arrays.append({"counts": counts.tolist(), "values": plain(values)})
                at += counts.nbytes + values.nbytes
            else:
                values = np.frombuffer(raw, entry["dtype"], int(np.prod(shape)), at).reshape(shape)
                arrays.append(plain(values))
                at += values.nbytes
        found[entry["name"]] = arrays
    return found


def plain(values: Any) -> Any:
    """Nested lists, NaN as None, so that JSON can hold them."""
    if isinstance(values, np.ndarray):
        return [plain(value) for value in values]
    number = values.item()
    return None if number != number else number


def read_json(raw: bytes) -> Any:
    return json.loads(raw.decode("utf-8", "surrogatepass"))


def read_record(data: bytes, header: dict[str, Any], dictionaries: dict[int, bytes]) -> dict[str, Any]:
    """The columns of a record; one that cannot be had is the text "damaged" or "no dictionary"."""
    found: dict[str, Any] = {"rollout_id": header["rollout_id"], "attempt": header["attempt"]}

    def column(name: str, read: Any) -> None:
        try:
            found[name] = read()
        except Damaged:
            found[name] = "damaged"
        except NoDictionary:
            found[name] = "no dictionary"

    def frame(kind: int) -> bytes:
        return read_frame(data, header, kind, dictionaries)

    column("summary", lambda: read_summary(frame(SUMMARY)))
    column("tokens", lambda: read_tokens(found["summary"]["lengths"], frame(TOKENS), frame(LOGPROBS)))
    column("record", lambda: read_json(frame(RECORD)))
    column("text", lambda: read_json(frame(TEXT)))
    column("columns", lambda: read_columns(data, header, dictionaries))
    return found


def read_shard(data: bytes, dictionaries: dict[int, bytes]) -> dict[str, Any]:
    """The records of a finished shard, and the stretches that were passed over as damaged."""
    records: list[dict[str, Any]] = []
    damaged: list[list[int]] = []
    at = 0
    while at < len(data):
        try:
            header = read_header(data, at)
        except NewerFormat as error:
            return {"refused": f"major version {error}"}
        if header is None or header["end"] > len(data):
            start, at = at, at + 1
            while at < len(data) and read_header(data, at) is None:
                at += 1
            damaged.append([start, at])
        else:
            records.append({"offset": at, **read_record(data, header, dictionaries)})
            at = header["end"]
    return {"records": records, "damaged": damaged}


def read_log(data: bytes) -> dict[str, Any]:
    """The marks of a commit log, and how many whole entries are damaged; a short last one is neither."""
    marks, damaged = [], 0
    for at in range(0, len(data) - 63, 64):
        entry, (checksum,) = data[at : at + 56], struct.unpack_from("<Q", data, at + 56)
        if entry[:8] != b"hpcrmark" or xxhash.xxh3_64_intdigest(entry) != checksum:
            damaged += 1
            continue
        shard, offset, length, segment, ordinal, attempt, record = struct.unpack_from("<QQQ8sIIQ", entry, 8)
        marks.append(
            {
                "shard": shard,
                "offset": offset,
                "length": length,
                "rollout_id": f"{segment.hex()}/{ordinal}",
                "attempt": attempt,
                "record": f"{record:016x}",
            }
        )
    return {"marks": marks, "damaged": damaged}
