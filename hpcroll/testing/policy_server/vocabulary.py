"""What a tokenizer must do here: encode, decode, and say the same bytes in other tokens."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from random import Random
from typing import Protocol


class Vocabulary(Protocol):
    """A byte-level tokenizer: every single byte has an id."""

    def encode(self, text: str) -> list[int]:
        """The canonical ids of `text`."""

    def piece(self, token_id: int) -> bytes:
        """The bytes of one token as decoded text shows them, empty for hidden control tokens."""

    def id_of(self, piece: bytes) -> int | None:
        """The id of the text token with these bytes, None where there is none."""

    def is_text(self, token_id: int) -> bool:
        """False for control tokens, which are never split."""


def decode(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """The text of `ids`; bytes that are no UTF-8 (a reply cut in mid-character) are replaced."""
    return b"".join(vocabulary.piece(token_id) for token_id in ids).decode("utf-8", errors="replace")


def texts(vocabulary: Vocabulary, ids: Sequence[int]) -> Iterator[str]:
    """What each id adds to the text: a character whose bytes lie in several ids comes with its last."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for place, token_id in enumerate(ids, start=1):
        yield decoder.decode(vocabulary.piece(token_id), final=place == len(ids))


def split_some(vocabulary: Vocabulary, ids: Sequence[int], random: Random) -> list[list[int]]:
    """For each id itself, or for about one in eight other ids with the same bytes.

    Every id stays alone where no text token has two bytes.
    """
    places = [
        place
        for place, token_id in enumerate(ids)
        if vocabulary.is_text(token_id) and len(vocabulary.piece(token_id)) > 1
    ]
    chosen = set(random.sample(places, k=max(1, len(places) // 8))) if places else set()
    return [
        _split(vocabulary, token_id, random) if place in chosen else [token_id]
        for place, token_id in enumerate(ids)
    ]


def split_characters(vocabulary: Vocabulary, ids: Sequence[int]) -> list[list[int]]:
    """For each id itself, or one id a byte where it holds anything beyond ASCII."""
    result = []
    for token_id in ids:
        piece = vocabulary.piece(token_id)
        beyond = vocabulary.is_text(token_id) and any(byte > 0x7F for byte in piece)
        result.append(_bytes_of(vocabulary, piece) if beyond else [token_id])
    return result


def _split(vocabulary: Vocabulary, token_id: int, random: Random) -> list[int]:
    piece = vocabulary.piece(token_id)
    cuts = list(range(1, len(piece)))
    random.shuffle(cuts)
    for cut in cuts:
        left, right = vocabulary.id_of(piece[:cut]), vocabulary.id_of(piece[cut:])
        if left is not None and right is not None:
            return [left, right]
    return _bytes_of(vocabulary, piece)


def _bytes_of(vocabulary: Vocabulary, piece: bytes) -> list[int]:
    ids = [vocabulary.id_of(bytes([byte])) for byte in piece]
    return [token_id for token_id in ids if token_id is not None]
