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
from hpcroll.testing.policy_server.vocabulary import decode, split_some

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
    """The `Vocabulary` of Tekken."""

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
        return decode(self, ids)

    def resplit(self, ids: Sequence[int], random: Random) -> list[int]:
        """Other ids of the same text: some tokens are split into two valid ones with the same bytes.

        Returns `ids` unchanged where no token has two bytes.
        """
        return [token_id for group in split_some(self, ids, random) for token_id in group]

    def is_text(self, token_id: int) -> bool:
        return token_id >= CONTROL_LIMIT

    def id_of(self, piece: bytes) -> int | None:
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
