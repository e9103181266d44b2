"""Token arrays as the bytes of their frames: split so that what repeats stands beside its like.

Layout, little-endian (docs/reference/shard-format.md), T tokens of all segments in a row:

    TOKENS    low half of the ids u16 (T), high half u8 (T) or, where an id needs it, u16 (T), sampled u8 (T),
              loss mask u8 (T)
    LOGPROBS  I count n, one zstd frame with n exponents u8, then n low mantissas u16, n high mantissas u8

n is the number of sampled tokens, whose log-probabilities alone are kept where all others are NaN; else T.
The 32 bits of a float, rotated left by one, are its exponent (8), high mantissa (8), low mantissa and sign
(16): only exponents repeat, so only they are compressed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcroll.contract import Flags, Floats, Ids, SegmentTokens
from hpcroll.errors import ShardCorruptError
from hpcroll.shards.format.buffers import take_buffer
from hpcroll.shards.format.compression import compress, decompress

_COUNT = struct.Struct("<I")
_EXPONENTS_LEVEL = 1
_ONE, _BYTE, _HALF, _EXPONENT, _SIGN = (np.uint32(bits) for bits in (1, 8, 16, 24, 31))


def pack_tokens(tokens: Sequence[SegmentTokens]) -> bytes:
    """The frame TOKENS of all segments."""
    ids = joined([part.ids for part in tokens], "<u4")
    high = ids >> _HALF
    width = "<u2" if ids.size and high.max() > 0xFF else "u1"
    sampled = joined([part.sampled for part in tokens], "u1")
    loss_mask = joined([part.loss_mask for part in tokens], "u1")
    return b"".join([ids.astype("<u2").data, high.astype(width).data, sampled.data, loss_mask.data])


def pack_logprobs(tokens: Sequence[SegmentTokens]) -> bytes:
    """The frame LOGPROBS of all segments."""
    values, _ = kept_logprobs(tokens)
    bits = values.view("<u4")
    rotated = (bits << _ONE) | (bits >> _SIGN)
    exponents = compress((rotated >> _EXPONENT).astype("u1").tobytes(), _EXPONENTS_LEVEL)
    low, high = rotated.astype("<u2"), (rotated >> _HALF).astype("u1")
    return b"".join([_COUNT.pack(len(values)), exponents, low.data, high.data])


def parse_tokens(raw: bytes | memoryview, total: int) -> tuple[Ids, Flags, Flags]:
    """Ids, sampled and loss mask of all segments, each (total,) and read-only."""
    width = (len(raw) - 4 * total) // total if total else 1
    if width not in (1, 2) or len(raw) != total * (4 + width):
        raise ShardCorruptError(f"{len(raw)} bytes of ids and masks for {total} tokens")
    high = np.frombuffer(raw, f"<u{width}", total, 2 * total)
    ids = take_buffer(4 * total).view(np.uint32)
    np.left_shift(high, _HALF, out=ids)
    ids |= np.frombuffer(raw, "<u2", total)
    ids.flags.writeable = False
    masks = np.frombuffer(raw, np.uint8, 2 * total, (2 + width) * total)
    return ids, masks[:total], masks[total:]


def parse_logprobs(raw: bytes | memoryview, sampled: Flags) -> Floats:
    """The log-probabilities of all segments, (T,) and read-only; NaN where nothing was sampled."""
    count = _COUNT.unpack_from(raw)[0] if len(raw) >= _COUNT.size else 0
    mantissas = len(raw) - 3 * count
    if mantissas < _COUNT.size:
        raise ShardCorruptError(f"{len(raw)} bytes of {count} log-probabilities")
    exponents = np.frombuffer(decompress(memoryview(raw)[_COUNT.size : mantissas], count), np.uint8)
    rotated = exponents.astype(np.uint32)
    rotated <<= _BYTE
    rotated |= np.frombuffer(raw, np.uint8, count, mantissas + 2 * count)
    rotated <<= _HALF
    rotated |= np.frombuffer(raw, "<u2", count, mantissas)
    values = ((rotated >> _ONE) | (rotated << _SIGN)).view(np.float32)
    if count != len(sampled):
        chosen = sampled != 0
        if np.count_nonzero(chosen) != count:
            raise ShardCorruptError(
                f"{count} log-probabilities for {np.count_nonzero(chosen)} sampled tokens"
            )
        whole = take_buffer(4 * len(sampled)).view(np.float32)
        whole.fill(np.nan)
        whole[chosen] = values
        values = whole
    values.flags.writeable = False
    return values


def kept_logprobs(tokens: Sequence[SegmentTokens]) -> tuple[Floats, bool]:
    """The log-probabilities that must be stored: those of sampled tokens alone (True) where all others are
    NaN, else those of all tokens (False)."""
    values = joined([part.logprobs for part in tokens], "<f4")
    sampled = joined([part.sampled for part in tokens], "u1") != 0
    alone = bool(np.isnan(values[~sampled]).all())
    return (values[sampled] if alone else values), alone


def joined(parts: Sequence[NDArray[Any]], dtype: str) -> NDArray[Any]:
    """`parts` in a row, as `dtype`; a single one may be returned as it is."""
    arrays = [np.ascontiguousarray(part, dtype) for part in parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, dtype), *arrays])
