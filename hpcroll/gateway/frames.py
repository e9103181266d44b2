"""How a journal lies on disk: one frame per model call, prompts as deltas.


    magic    4 bytes   b"HRJ1"
    length   uint32    bytes of the payload
    session  uint64    xxh3-64 of "<rollout_id>.<attempt>", to skip other sessions' frames unread
    checksum uint64    xxh3-64 of magic, length and session as written, then the payload
    payload            zstd of: uint32 length of the head, head, arrays

The head is JSON: `call` (a `Call`), `base` and `keep` (the prompt's first `keep` ids are those of call
`base`, prompt and samples, of the same session; null: none), `tail` and `sampled` (lengths). The arrays
are the prompt's tail (uint32), the sampled ids (uint32) and their log-probabilities (float32). All
numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Container, Iterator
from pathlib import Path

import numpy as np
import xxhash

from hpcroll.contract import Call, CallTokens, FoldedPrompt, Ids, RecordedCall
from hpcroll.errors import CorruptRecordError

_MAGIC = b"HRJ1"
_PREFIX = struct.Struct("<4sIQ")
_CHECKSUM = struct.Struct("<Q")
_HEAD_LENGTH = struct.Struct("<I")
_HEADER_BYTES = _PREFIX.size + _CHECKSUM.size


def session_key(rollout_id: str, attempt: int) -> int:
    """The number that marks a session's frames."""
    return xxhash.xxh3_64_intdigest(f"{rollout_id}.{attempt}".encode())


def encode(recorded: RecordedCall, *, known: Container[int]) -> bytes:
    """The payload of a frame, before compression.

    The prompt is written as it is folded where it builds on one of the `known` calls, else whole.
    """
    tokens = recorded.tokens
    folded = tokens.folded
    if folded is None or folded.base_index not in known:
        base, keep, tail = None, 0, tokens.prompt_ids
    else:
        base, keep, tail = folded.base_index, folded.keep, folded.tail
    lengths = {"base": base, "keep": keep, "tail": len(tail), "sampled": len(tokens.sampled_ids)}
    # The call as its own serialiser writes it: a detour over dicts takes longer than all the rest.
    head = b'{"call":%b,%b' % (recorded.call.model_dump_json().encode(), json.dumps(lengths)[1:].encode())
    arrays = (
        tail.astype("<u4", copy=False).tobytes(),
        tokens.sampled_ids.astype("<u4", copy=False).tobytes(),
        tokens.logprobs.astype("<f4", copy=False).tobytes(),
    )
    return b"".join((_HEAD_LENGTH.pack(len(head)), head, *arrays))


def decode(data: bytes, session: dict[int, CallTokens], *, where: str) -> RecordedCall:
    """The call of a decompressed payload; `session` holds the tokens of its session's calls so far, by index.

    Raises `CorruptRecordError`, which names `where`, if the prompt builds on a call that is not there.
    """
    (head_length,) = _HEAD_LENGTH.unpack_from(data)
    start = _HEAD_LENGTH.size + head_length
    head = json.loads(data[_HEAD_LENGTH.size : start])
    tail = _ids(data, start, head["tail"])
    sampled = _ids(data, start + 4 * head["tail"], head["sampled"])
    logprobs = np.frombuffer(
        data, "<f4", head["sampled"], start + 4 * (head["tail"] + head["sampled"])
    ).astype(np.float32)
    call = Call.model_validate(head["call"])
    prompt: Ids | FoldedPrompt = tail
    if head["base"] is not None:
        base = session.get(head["base"])
        if base is None or base.prompt_length + len(base.sampled_ids) < head["keep"]:
            raise CorruptRecordError(
                f"{where}: rollout {call.rollout_id} call {call.call_index} builds on "
                f"call {head['base']}, which is not there"
            )
        prompt = FoldedPrompt(head["base"], base, head["keep"], tail)
    tokens = CallTokens(prompt, sampled, logprobs)
    session[call.call_index] = tokens
    return RecordedCall(call, tokens)


def _ids(data: bytes, offset: int, count: int) -> Ids:
    return np.frombuffer(data, "<u4", count, offset).astype(np.uint32)


def frame(session: int, payload: bytes) -> bytes:
    """A frame with a compressed payload."""
    prefix = _PREFIX.pack(_MAGIC, len(payload), session)
    return b"".join((prefix, _CHECKSUM.pack(_checksum(prefix, payload)), payload))


def _checksum(prefix: bytes, payload: bytes) -> int:
    digest = xxhash.xxh3_64(prefix)
    digest.update(payload)
    return digest.intdigest()


def frames(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """The (offset, session, compressed payload) of each whole frame of a file that may still grow.

    Ends at a torn tail; raises `CorruptRecordError` where whole frames follow the damage.
    """
    with path.open("rb") as file:
        offset = 0
        while True:
            header = file.read(_HEADER_BYTES)
            length = _payload_length(header)
            payload = file.read(length) if length is not None else b""
            if length is None or not _is_whole(header, length, payload):
                break
            yield offset, _PREFIX.unpack_from(header)[2], payload
            offset += _HEADER_BYTES + length
        file.seek(offset)
        rest = file.read()
    if _holds_whole_frame(rest[1:]):
        raise CorruptRecordError(
            f"journal {path} is damaged at byte {offset}, and whole records follow; the calls before it "
            "are good, those after it are lost with it"
        )


def _payload_length(header: bytes) -> int | None:
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
        return None
    return int(_PREFIX.unpack_from(header)[1])


def _is_whole(header: bytes, length: int, payload: bytes) -> bool:
    (checksum,) = _CHECKSUM.unpack_from(header, _PREFIX.size)
    return len(payload) == length and _checksum(header[: _PREFIX.size], payload) == checksum


def _holds_whole_frame(data: bytes) -> bool:
    at = data.find(_MAGIC)
    while at >= 0:
        header = data[at : at + _HEADER_BYTES]
        length = _payload_length(header)
        start = at + _HEADER_BYTES
        if length is not None and _is_whole(header, length, data[start : start + length]):
            return True
        at = data.find(_MAGIC, at + 1)
    return False
