"""A reader of packs that owes nothing to hpcroll: written from docs/reference/shard-format.md.

It is what the vectors are checked with, and a start for whoever reads packs in another language.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import xxhash
import zstandard

RECORD, TEXT = 4, 5
SUMMARIES, TOKENS, LOGPROBS, REST, VOCABULARY, MASKS, MIDDLE, LOW = range(256, 264)
SHARED_VOCABULARY, SHARED_TOKENS, SHARED_REST = range(264, 267)
FLOAT16, CODES = 1, 2
ABSENT = (1 << 64) - 1
DTYPES = ("<u1", "<u2", "<u4", "<u8", "<i4", "<i8", "<f4", "<f8")


class Damaged(Exception):
    """Bytes that are not as they were written."""


def read_pack(data: bytes) -> dict[str, Any]:
    """Every row of a pack in file order, and whether its index was damaged."""
    index = read_index(data)
    if index is None:
        tables = []
        for at, header in scan(data):
            if not header["rows"]:
                continue
            try:
                tables.append((at, header, read_table(frame(data, at, header, SUMMARIES))))
            except Damaged:
                continue
        rows = [row for at, header, table in tables for row in read_block(data, at, header, rows_of(table))]
        return {"rows": rows, "index_damaged": True}
    known, found, start = rows_of(index), [], 0
    for at, count in zip(index["block_offset"].tolist(), index["block_rows"].tolist(), strict=True):
        if count:
            found += read_block(data, at, read_header(data, at), known[start : start + count])
        start += count
    return {"rows": found, "index_damaged": False}


def read_index(data: bytes) -> dict[str, Any] | None:
    trailer = data[-40:]
    if trailer[:8] != b"hpcrpack" or xxhash.xxh3_64_intdigest(trailer[:32]) != _u64(trailer, 32):
        return None
    at, size, checksum = struct.unpack_from("<QQQ", trailer, 8)
    stored = data[at : at + size]
    if xxhash.xxh3_64_intdigest(stored) != checksum:
        return None
    raw = zstandard.ZstdDecompressor().decompress(stored[8:])
    assert len(raw) == _u64(stored, 0)
    return read_table(raw)


def scan(data: bytes) -> list[tuple[int, dict[str, Any]]]:
    """Every sound block header with its offset."""
    found, at = [], 0
    while (at := data.find(b"hpcrblk", at)) >= 0:
        header = read_header(data, at)
        if header is not None:
            found.append((at, header))
        at += 1
    return found


def read_header(data: bytes, at: int) -> dict[str, Any] | None:
    if data[at : at + 7] != b"hpcrblk" or len(data) < at + 32:
        return None
    count, rows, tokens = struct.unpack_from("<HIQ", data, at + 10)
    end = at + 32 + 32 * count
    if count > 64 or len(data) < end + 8 or xxhash.xxh3_64_intdigest(data[at:end]) != _u64(data, end):
        return None
    frames, start = {}, end + 8
    for entry in range(at + 32, end, 32):
        kind, encoding, shared, stored, raw, checksum = struct.unpack_from("<IHHQQQ", data, entry)
        frames[kind] = (encoding, shared, start, stored, raw, checksum)
        start += stored
    return {"rows": rows, "tokens": tokens, "frames": frames}


def frame(data: bytes, at: int, header: dict[str, Any], kind: int) -> bytes:
    """The raw bytes of a frame of the block at `at`."""
    _, shared, start, size, raw_bytes, checksum = header["frames"][kind]
    stored = data[start : start + size]
    if xxhash.xxh3_64_intdigest(stored) != checksum:
        raise Damaged(kind)
    if size == raw_bytes:
        return stored
    dictionary = None
    if shared:
        content = read_shared(data)[{TOKENS: SHARED_TOKENS, REST: SHARED_REST}[kind]]
        dictionary = zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    raw = zstandard.ZstdDecompressor(dict_data=dictionary).decompress(stored)
    assert len(raw) == raw_bytes
    return raw


def read_shared(data: bytes) -> dict[int, bytes]:
    """What blocks share, by kind: the first copy that is as it was written."""
    for at, header in scan(data):
        if not header["rows"]:
            try:
                return {kind: frame(data, at, header, kind) for kind in header["frames"]}
            except Damaged:
                continue
    raise Damaged("shared")


def read_table(raw: bytes) -> dict[str, Any]:
    (count,), at, entries = struct.unpack_from("<I", raw), 4, []
    for _ in range(count):
        size = raw[at]
        name = raw[at + 1 : at + 1 + size].decode()
        dtype, length = struct.unpack_from("<BQ", raw, at + 1 + size)
        entries.append((name, np.dtype(DTYPES[dtype]), length))
        at += size + 10
    columns = {}
    for name, dtype, length in entries:
        at += -at % 8
        columns[name] = np.frombuffer(raw, dtype, length, at)
        at += length * dtype.itemsize
    return columns


def rows_of(table: dict[str, Any]) -> list[dict[str, Any]]:
    """What a table says of each row."""
    text, start = [], 0
    for end in table["string_ends"].tolist():
        text.append(table["strings"][start:end].tobytes().decode("utf-8", "surrogatepass"))
        start = end
    found, first = [], 0
    for row in range(len(table["ordinal"])):
        one = {name: table[name][row] for name in table if len(table[name]) == len(table["ordinal"])}
        last = first + int(table["segments"][row])
        flags = int(one["flags"])
        found.append(
            {
                "rollout_id": f"{int(one['segment']):016x}/{int(one['ordinal'])}",
                "attempt": int(one["attempt"]),
                "place": [text[one["incarnation"]], int(one["shard_index"]), int(one["offset"])],
                "group": text[one["group"]],
                "status": text[one["status"]],
                "trainable": bool(flags & 1),
                "reward_valid": bool(flags & 2),
                "reward": float(one["reward"]) if flags & 4 else None,
                "lengths": table["lengths"][first:last].tolist(),
                "version_low": table["version_low"][first:last].tolist(),
            }
        )
        first = last
    return found


def read_block(
    data: bytes, at: int, header: dict[str, Any] | None, rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """`rows` with the columns of their block; a column that is damaged is the text `damaged`."""
    if header is None:
        return [{**row, "tokens": "damaged", "record": "damaged", "text": "damaged"} for row in rows]
    try:
        tokens: Any = read_tokens(data, at, header, [row["lengths"] for row in rows])
    except Damaged:
        tokens = ["damaged"] * len(rows)
    try:
        rest = read_rest(frame(data, at, header, REST), len(rows))
    except Damaged:
        rest = {RECORD: ["damaged"] * len(rows), TEXT: ["damaged"] * len(rows)}
    return [
        {**row, "tokens": tokens[number], "record": rest[RECORD][number], "text": rest[TEXT][number]}
        for number, row in enumerate(rows)
    ]


def read_tokens(data: bytes, at: int, header: dict[str, Any], lengths: list[list[int]]) -> list[Any]:
    total = header["tokens"]
    masks = np.frombuffer(frame(data, at, header, MASKS), "u1")
    if header["frames"][MASKS][0] == 3:  # eight to a byte
        size = (total + 7) // 8
        masks = np.concatenate(
            [np.unpackbits(masks[i : i + size])[:total] for i in range(0, len(masks), size)]
        )
    sampled, loss_mask = masks[:total], masks[-total:]
    ids = read_ids(data, at, header)
    logprobs = read_logprobs(data, at, header)
    if len(logprobs) != total:
        whole = np.full(total, np.nan, "<f4")
        whole[sampled == 1] = logprobs
        logprobs = whole
    found, start = [], 0
    for row in lengths:
        segments = []
        for length in row:
            own = slice(start, start + length)
            known = [None if np.isnan(value) else float(value) for value in logprobs[own]]
            flags = {"sampled": sampled[own].tolist(), "loss_mask": loss_mask[own].tolist()}
            segments.append({"ids": ids[own].tolist(), **flags, "logprobs": known})
            start += length
        found.append(segments)
    return found


def read_ids(data: bytes, at: int, header: dict[str, Any]) -> Any:
    raw = frame(data, at, header, TOKENS)
    if header["frames"][TOKENS][0] != CODES:
        return np.frombuffer(raw, "<u4")
    alone = np.cumsum(joined(frame(data, at, header, VOCABULARY)), dtype="<u4")
    shared = header["frames"][VOCABULARY][1]
    known = joined(read_shared(data)[SHARED_VOCABULARY]) if shared else alone[:0]
    return np.concatenate([known, alone])[np.frombuffer(raw, "<u2")]


def joined(raw: bytes) -> Any:
    """Numbers of which all low halves stand before all high halves."""
    low, high = np.frombuffer(raw, "<u2").reshape(2, -1).astype("<u4")
    return low + 65536 * high


def read_logprobs(data: bytes, at: int, header: dict[str, Any]) -> Any:
    high = np.frombuffer(frame(data, at, header, LOGPROBS), "u1").astype("<u4")
    low = frame(data, at, header, LOW)
    if header["frames"][LOGPROBS][0] == FLOAT16:
        return (256 * high + np.frombuffer(low, "u1")).astype("<u2").view("<f2").astype("<f4")
    middle = np.frombuffer(frame(data, at, header, MIDDLE), "u1")
    return ((high << 24) + 65536 * middle.astype("<u4") + np.frombuffer(low, "<u2")).astype("<u4").view("<f4")


def read_rest(raw: bytes, rows: int) -> dict[int, list[Any]]:
    (count,) = struct.unpack_from("<I", raw)
    start, found = 4 + 12 * count, {}
    for entry in range(count):
        kind, size = struct.unpack_from("<IQ", raw, 4 + 12 * entry)
        part, at, values = raw[start : start + size], 8 * rows, []
        for length in np.frombuffer(part, "<u8", rows).tolist():
            if length == ABSENT:
                values.append(None)
                continue
            values.append(json.loads(part[at : at + length].decode("utf-8", "surrogatepass")))
            at += length
        found[kind] = values
        start += size
    return found


def _u64(data: bytes, at: int) -> int:
    (value,) = struct.unpack_from("<Q", data, at)
    return int(value)
