"""A real tokenizer: Tekken, whose vocabulary ships in the PyPI package `mistral-common`."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random

import tiktoken

from hpcroll.errors import ConfigError

BOS, EOS = 1, 2
BEGIN_USER, END_USER = 3, 4
BEGIN_TOOLS, END_TOOLS = 5, 6
BEGIN_RESULT, END_RESULT = 7, 8
TOOL_CALLS = 9
BEGIN_SYSTEM, END_SYSTEM = 17, 18
CONTROL_LIMIT = 1000
"""Ids below are control tokens; text never encodes to them."""

_VOCABULARY = "data/tekken_240718.json"


class Tokens:
    """Encodes, decodes, and encodes otherwise: the same bytes in other tokens."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding

    @staticmethod
    def load() -> Tokens:
        """The tokenizer, loaded once per process (about 0.4 s).

        Raises `ConfigError` where `mistral-common` is not installed.
        """
        return _load()

    def encode(self, text: str) -> list[int]:
        """The canonical ids of `text`; control tokens spelt in a text are text."""
        return self._encoding.encode_ordinary(text)

    def piece(self, token_id: int) -> bytes:
        """The bytes of one token, empty for control tokens."""
        return b"" if token_id < CONTROL_LIMIT else self._encoding.decode_single_token_bytes(token_id)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; bytes that are no UTF-8 (a reply cut in mid-character) are replaced."""
        return b"".join(self.piece(token_id) for token_id in ids).decode("utf-8", errors="replace")

    def resplit(self, ids: Sequence[int], random: Random) -> list[int]:
        """Other ids of the same text: some tokens are split into two valid ones with the same bytes.

        Returns `ids` unchanged where no token has two bytes.
        """
        places = [place for place, token_id in enumerate(ids) if len(self.piece(token_id)) > 1]
        if not places:
            return list(ids)
        chosen = set(random.sample(places, k=max(1, len(places) // 8)))
        result: list[int] = []
        for place, token_id in enumerate(ids):
            result += self._split(token_id, random) if place in chosen else [token_id]
        return result

    def _split(self, token_id: int, random: Random) -> list[int]:
        piece = self.piece(token_id)
        cuts = list(range(1, len(piece)))
        random.shuffle(cuts)
        for cut in cuts:
            left, right = self._id_of(piece[:cut]), self._id_of(piece[cut:])
            if left is not None and right is not None:
                return [left, right]
        # Every single byte is in the vocabulary, so there is always this way.
        return [self._encoding.encode_single_token(bytes([byte])) for byte in piece]

    def _id_of(self, piece: bytes) -> int | None:
        try:
            return self._encoding.encode_single_token(piece)
        except KeyError:
            return None


@cache
def _load() -> Tokens:
    # The package is located, not imported: only its data is wanted, and importing it pulls in Pillow.
    spec = find_spec("mistral_common")
    if spec is None or spec.origin is None:
        raise ConfigError("the scripted policy server needs a tokenizer: pip install 'hpcroll[testing]'")
    data = json.loads((Path(spec.origin).parent / _VOCABULARY).read_bytes())
    control = data["config"]["default_num_special_tokens"]
    words = data["vocab"][: data["config"]["default_vocab_size"] - control]
    ranks = {base64.b64decode(word["token_bytes"]): word["rank"] + control for word in words}
    encoding = tiktoken.Encoding(
        "tekken", pat_str=data["config"]["pattern"], mergeable_ranks=ranks, special_tokens={}
    )
    return Tokens(encoding)
