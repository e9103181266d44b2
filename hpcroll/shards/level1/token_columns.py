"""Ids and log-probabilities as the frames of a block: what repeats stands beside its like.

Ids become u16 numbers of a vocabulary: ids that are frequent in the pack (shared), then those of the block
alone. Log-probabilities are taken apart into bytes: only the highest, sign and exponent, repeat; the others
usually stand as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcroll.contract import Flags, Floats, Ids, SegmentTokens
from hpcroll.errors import ShardCorruptError
from hpcroll.shards.level1.block import BlockKind, Encoding, RawFrame
from hpcroll.shards.level1.buffers import take_buffer
from hpcroll.shards.level1.dictionary import PackDictionary

_LEVEL = 1
"""Higher levels of zstd take chance for matches in these bytes, and make them larger."""
_MOST_CODES = 1 << 16
_HALF = np.uint32(16)
_LOWEST_FLOAT16 = np.float32(np.finfo(np.float16).min)


def halves(numbers: NDArray[Any]) -> bytes:
    """The low halves of u32 `numbers`, then the high ones."""
    whole = numbers.astype("<u4")
    return whole.astype("<u2").tobytes() + (whole >> _HALF).astype("<u2").tobytes()


def join_halves(raw: memoryview) -> Ids:
    """What `halves` took apart, uint32 (len(raw) / 4,)."""
    low, high = np.frombuffer(raw, "<u2").reshape(2, -1)
    joined: Ids = (high.astype(np.uint32) << _HALF) | low
    return joined


def codes_of(ids: Ids, vocabulary: Ids) -> tuple[NDArray[np.uint16] | None, Ids]:
    """Each id's number in `vocabulary` followed by the other ids, ascending; and these. None: too many."""
    known, inverse = np.unique(ids, return_inverse=True)
    order = np.argsort(vocabulary)
    at = np.searchsorted(vocabulary, known, sorter=order)
    numbers = order[np.minimum(at, len(order) - 1)] if len(order) else np.zeros(len(known), np.int64)
    other = vocabulary[numbers] != known if len(order) else np.ones(len(known), np.bool_)
    alone = known[other].astype(np.uint32)
    if len(vocabulary) + len(alone) > _MOST_CODES:
        return None, alone
    numbers[other] = len(vocabulary) + np.arange(len(alone))
    return numbers[inverse.reshape(-1)].astype(np.uint16), alone


def id_frames(
    segments: Sequence[SegmentTokens], vocabulary: Ids, dictionary: PackDictionary | None
) -> dict[int, RawFrame]:
    """The frames VOCABULARY and TOKENS."""
    ids = _joined([segment.ids for segment in segments], "<u4")
    codes, alone = codes_of(ids, vocabulary)
    if codes is None:
        return {BlockKind.TOKENS: RawFrame(Encoding.PLAIN, ids.tobytes())}
    steps = halves(np.diff(alone, prepend=np.uint32(0)))
    return {
        BlockKind.VOCABULARY: RawFrame(Encoding.PLAIN, steps, shared=len(vocabulary) > 0),
        BlockKind.TOKENS: RawFrame(Encoding.CODES, codes.astype("<u2").tobytes(), dictionary),
    }


def mask_frame(segments: Sequence[SegmentTokens]) -> RawFrame:
    """The frame MASKS."""
    sampled = _joined([segment.sampled for segment in segments], "u1").tobytes()
    loss_mask = _joined([segment.loss_mask for segment in segments], "u1").tobytes()
    return RawFrame(Encoding.PLAIN, sampled + (b"" if loss_mask == sampled else loss_mask))


def logprob_frames(segments: Sequence[SegmentTokens], *, float16: bool) -> dict[int, RawFrame]:
    """The frames LOGPROBS, LOGPROBS_MIDDLE (not with `float16`) and LOGPROBS_LOW."""
    values = _joined([segment.logprobs for segment in segments], "<f4")
    sampled = _joined([segment.sampled for segment in segments], "u1") != 0
    alone = bool(np.isnan(values[~sampled]).all())
    if alone:
        values = values[sampled]
    if alone and float16:
        bits = np.maximum(values, _LOWEST_FLOAT16).astype("<f2").view("<u2")
        return {
            BlockKind.LOGPROBS: _bytes_frame(Encoding.FLOAT16, bits >> 8, "u1"),
            BlockKind.LOGPROBS_LOW: _bytes_frame(Encoding.FLOAT16, bits, "u1"),
        }
    bits = values.view("<u4")
    return {
        BlockKind.LOGPROBS: _bytes_frame(Encoding.PLAIN, bits >> 24, "u1"),
        BlockKind.LOGPROBS_MIDDLE: _bytes_frame(Encoding.PLAIN, bits >> _HALF, "u1"),
        BlockKind.LOGPROBS_LOW: _bytes_frame(Encoding.PLAIN, bits, "<u2"),
    }


def fill_ids(raw: memoryview, encoding: int, vocabulary: Ids, ids: Ids, *, where: str) -> None:
    """Fills `ids` (N,) from a frame TOKENS; raises `ShardCorruptError` where it does not fit."""
    width = 2 if encoding == Encoding.CODES else 4
    if len(raw) != width * len(ids) or encoding not in (Encoding.CODES, Encoding.PLAIN):
        raise ShardCorruptError(f"{where}: {len(raw)} bytes of ids do not fit {len(ids)} tokens")
    numbers = np.frombuffer(raw, f"<u{width}")
    if encoding == Encoding.PLAIN:
        ids[:] = numbers
    elif len(ids):
        if int(numbers.max()) >= len(vocabulary):
            raise ShardCorruptError(f"{where}: a code is not among the {len(vocabulary)} of the vocabulary")
        # With any other mode numpy copies the codes or the ids once more.
        vocabulary.take(numbers, out=ids, mode="wrap")


def fill_logprobs(
    high: memoryview, middle: memoryview, low: memoryview, sampled: Flags, floats: Floats, *, where: str
) -> None:
    """Fills `floats` (N,) from the frames of float32: NaN where nothing was sampled and they say nothing."""
    count, taken = len(high), np.count_nonzero(sampled)
    if count not in (taken, len(sampled)) or len(middle) != count or len(low) != 2 * count:
        raise ShardCorruptError(f"{where}: {count} log-probabilities for {taken} of {len(sampled)} tokens")
    alone = count != len(sampled)
    upper = take_buffer(2 * count).view("<u2")
    np.left_shift(np.frombuffer(high, np.uint8), 8, out=upper, dtype=np.uint16)
    upper |= np.frombuffer(middle, np.uint8)
    bits = take_buffer(4 * count).view("<u4") if alone else floats.view("<u4")
    bits[:] = upper
    bits <<= _HALF
    bits |= np.frombuffer(low, "<u2")
    if alone:
        floats.fill(np.nan)
        floats[sampled.view(np.bool_)] = bits.view("<f4")


def fill_logprobs_16(
    high: memoryview, low: memoryview, sampled: Flags, floats: Floats, *, where: str
) -> None:
    """Fills `floats` (N,) from the frames of float16: NaN where nothing was sampled."""
    taken = np.count_nonzero(sampled)
    if not len(high) == len(low) == taken:
        raise ShardCorruptError(f"{where}: {len(high)} log-probabilities for {taken} sampled tokens")
    codes = np.left_shift(np.frombuffer(high, np.uint8), 8, dtype=np.uint16)
    codes |= np.frombuffer(low, np.uint8)
    floats.fill(np.nan)
    # A table of all 65536 values: numpy converts them one by one, at half the speed.
    floats[sampled.view(np.bool_)] = _float16_values()[codes]


@cache
def _float16_values() -> Floats:
    return np.arange(1 << 16, dtype=np.uint16).view("<f2").astype(np.float32)


def _bytes_frame(encoding: Encoding, bits: NDArray[Any], dtype: str) -> RawFrame:
    return RawFrame(encoding, bits.astype(dtype).tobytes(), level=_LEVEL)


def _joined(parts: Sequence[NDArray[Any]], dtype: str) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *(np.ascontiguousarray(part, dtype) for part in parts)])
