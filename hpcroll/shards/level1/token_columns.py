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
from hpcroll.shards.format.buffers import take_buffer
from hpcroll.shards.format.token_bytes import joined, kept_logprobs
from hpcroll.shards.level1.block import BlockKind, Encoding, RawFrame
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
    ids = joined([segment.ids for segment in segments], "<u4")
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
    masks = [joined([segment.sampled for segment in segments], "u1")]
    loss_mask = joined([segment.loss_mask for segment in segments], "u1")
    if not np.array_equal(loss_mask, masks[0]):
        masks.append(loss_mask)
    if any(mask.max(initial=0) > 1 for mask in masks):
        return RawFrame(Encoding.PLAIN, b"".join(mask.tobytes() for mask in masks))
    return RawFrame(Encoding.BITS, b"".join(np.packbits(mask).tobytes() for mask in masks))


def parse_masks(raw: memoryview, encoding: int, total: int, where: str) -> tuple[Flags, Flags]:
    """sampled and the loss mask of the frame MASKS, uint8 (total,) each and read-only.

    Raises `ShardCorruptError` where it is not of `total` tokens.
    """
    flags = np.frombuffer(raw, np.uint8)
    size = total if encoding == Encoding.PLAIN else -(-total // 8)
    if len(raw) not in (size, 2 * size):
        raise ShardCorruptError(f"{where}: {len(raw)} bytes of masks for {total} tokens")
    masks = [flags[:size], flags[size:]] if len(raw) > size else [flags]
    if encoding != Encoding.PLAIN:
        masks = [np.unpackbits(mask, count=total) for mask in masks]
    return _read_only(masks[0]), _read_only(masks[-1])


def logprob_frames(segments: Sequence[SegmentTokens], *, float16: bool) -> dict[int, RawFrame]:
    """The frames LOGPROBS, LOGPROBS_MIDDLE (not with `float16`) and LOGPROBS_LOW."""
    values, alone = kept_logprobs(segments)
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


class TokenColumns:
    """The token arrays of a block; ids and log-probabilities are put together for any stretch of tokens."""

    def __init__(
        self,
        *,
        ids: memoryview,
        vocabulary: Ids | None,
        masks: tuple[Flags, Flags],
        logprobs: tuple[memoryview, memoryview | None, memoryview],
        total: int,
        where: str,
    ) -> None:
        """Raw frames of `total` tokens. `ids` are codes where there is a `vocabulary`. `masks`: sampled, loss
        mask. `logprobs`: highest bytes, middle (None: float16) and low. Raises `ShardCorruptError` where they
        do not fit."""
        if len(ids) != (4 if vocabulary is None else 2) * total:
            raise ShardCorruptError(f"{where}: {len(ids)} bytes of ids for {total} tokens")
        self.sampled, self.loss_mask = masks
        self._vocabulary = vocabulary
        self._ids = np.frombuffer(ids, "<u4" if vocabulary is None else "<u2")
        if vocabulary is not None and total and int(self._ids.max()) >= len(vocabulary):
            raise ShardCorruptError(f"{where}: a code is not among the {len(vocabulary)} of the vocabulary")
        high, middle, low = logprobs
        self._high = np.frombuffer(high, np.uint8)
        self._middle = None if middle is None else np.frombuffer(middle, np.uint8)
        self._low = np.frombuffer(low, np.uint8 if middle is None else "<u2")
        count, taken = len(self._high), np.count_nonzero(self.sampled)
        lengths = {count, len(self._low), count if self._middle is None else len(self._middle)}
        if len(lengths) > 1 or count not in (taken, total):
            raise ShardCorruptError(f"{where}: {count} log-probabilities for {taken} of {total} tokens")
        self._of_all = count == total

    def decode(self, start: int, end: int) -> tuple[Ids, Floats]:
        """ids uint32 and log-probabilities float32 of tokens [start, end), read-only views of one buffer; NaN
        where nothing was sampled and the block says nothing."""
        size = end - start
        own = take_buffer(8 * size)
        ids, floats = own[: 4 * size].view("<u4"), own[4 * size :].view("<f4")
        if self._vocabulary is None:
            ids[:] = self._ids[start:end]
        elif size:
            # With any other mode numpy copies once more; that no code is too large was checked.
            self._vocabulary.take(self._ids[start:end], out=ids, mode="wrap")
        if self._of_all:
            floats[:] = self._floats(start, end)
        else:
            floats.fill(np.nan)
            sampled = self.sampled[start:end].view(np.bool_)
            first = self._sampled_before(start)
            floats[sampled] = self._floats(first, first + int(np.count_nonzero(sampled)))
        return _read_only(ids), _read_only(floats)

    def _sampled_before(self, start: int) -> int:
        """How many of the tokens before `start` were sampled."""
        return int(np.count_nonzero(self.sampled[:start]))

    def _floats(self, first: int, last: int) -> Floats:
        """The log-probabilities [first, last) of those that the frames hold."""
        upper = np.left_shift(self._high[first:last], 8, dtype=np.uint16)
        if self._middle is None:
            # A table of all 65536 values: numpy converts them one by one, at half the speed.
            upper |= self._low[first:last]
            floats: Floats = _float16_values()[upper]
            return floats
        upper |= self._middle[first:last]
        bits = upper.astype(np.uint32)
        bits <<= _HALF
        bits |= self._low[first:last]
        return bits.view("<f4")


def _read_only(array: NDArray[Any]) -> Any:
    array.flags.writeable = False
    return array


@cache
def _float16_values() -> Floats:
    return np.arange(1 << 16, dtype=np.uint16).view("<f2").astype(np.float32)


def _bytes_frame(encoding: Encoding, bits: NDArray[Any], dtype: str) -> RawFrame:
    return RawFrame(encoding, bits.astype(dtype).tobytes(), level=_LEVEL)
