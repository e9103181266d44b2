"""A tokenizer as the `renderers` package wants one, over the light `tokenizers` library.

Control tokens (`<|im_end|>`, `<tool_call>`) that somebody merely spells in a message stay text: `guard` marks
them, and `encode` then keeps the marked ones out of the control vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from hpcroll.errors import ConfigError

EXTRA_HINT = "pip install 'hpcroll[tokens]'"

# Noncharacters: valid in UTF-8, never part of a text that means something.
_MARK = "\ufdd0"
_BREAK = _MARK + "\ufdd1"
"""Stands for nothing, within a control token that is only spelt."""
_LITERAL = _MARK + "\ufdd2"
"""Stands for the noncharacter itself."""
_TAG_OPENERS = ("<", "[", "|", "\uff5c")


class LightTokenizer:
    """Encodes and decodes text. Safe to share between threads."""

    def __init__(self, description: str, *, name: str, sha256: str, eos_token: str | None = None) -> None:
        """`description`: the text of a `tokenizer.json`. Raises `ConfigError` where it is none."""
        library = need("tokenizers")
        try:
            # The library raises a bare Exception for whatever it cannot read.
            self._backend = library.Tokenizer.from_str(description)
        except Exception as error:
            raise ConfigError(f"tokenizer {name}: not a tokenizer.json: {error}") from error
        self.name_or_path = name
        self.sha256 = sha256
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = None if eos_token is None else self._backend.token_to_id(eos_token)
        parsed = json.loads(description)
        control = [token for token in parsed.get("added_tokens") or () if _is_control(token)]
        self.control_ids = frozenset(int(token["id"]) for token in control)
        """Tokens that no text encodes to unless a template writes them."""
        spelt = sorted((re.escape(token["content"]) for token in control), key=len, reverse=True)
        self._control = re.compile("|".join(spelt) or r"(?!)")
        self._plain = library.Tokenizer.from_str(json.dumps(_without_control(parsed, control)))
        for token in parsed.get("added_tokens") or ():
            if token not in control and self._plain.token_to_id(token["content"]) != token["id"]:
                raise ConfigError(f"tokenizer {name}: the id of {token['content']!r} is not {token['id']}")
        self._byte_level = (parsed.get("decoder") or {}).get("type") == "ByteLevel"

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of `text`, without the control tokens that `guard` marked in it."""
        if _MARK not in text:
            return _ids(self._backend, text, add_special_tokens)
        ids: list[int] = []
        start = 0
        for match in self._control.finditer(text):
            ids += self._encode_plain(text[start : match.start()])
            ids.append(int(self._backend.token_to_id(match[0])))
            start = match.end()
        return ids + self._encode_plain(text[start:])

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 are replaced."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of one token, None where there is none; a list for several."""
        if isinstance(tokens, str):
            return self._backend.token_to_id(tokens)
        return [self._backend.token_to_id(token) for token in tokens]

    def guard(self, text: str) -> str:
        """`text` such that `encode` takes no control token from it, wherever it is embedded.

        What it is embedded in is encoded as ever. A guarded text that is not encoded here is of no use.
        """
        text = text.replace(_MARK, _LITERAL) if _MARK in text else text
        while (broken := self._control.sub(_break, text)) != text:
            text = broken
        return text

    @cached_property
    def pieces(self) -> list[bytes] | None:
        """The bytes of each id, for decoders that concatenate bytes; None for any other decoder."""
        if not self._byte_level:
            return None
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
        byte_of = _bytes_of_characters()
        for token, token_id in vocabulary.items():
            try:
                pieces[token_id] = bytes([byte_of[character] for character in token])
            except KeyError:
                pieces[token_id] = token.encode()
        return pieces

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        text = text.replace(_BREAK, "").replace(_LITERAL, _MARK)
        return _ids(self._plain, text, False)


def load_tokenizer(source: str) -> LightTokenizer:
    """The tokenizer at `source`: a directory with `tokenizer.json`, such a file, or a name on the hub.

    Raises `ConfigError` where there is none or where the library for it is missing.
    """
    path = Path(source).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        data = file.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        text = data.decode("utf-8", errors="replace")
        return LightTokenizer(text, name=source, sha256=digest, eos_token=_eos_token(file.parent))
    if path.exists() or source.count("/") != 1 or source.startswith((".", "~")):
        raise ConfigError(
            f"tokenizer {source}: no tokenizer.json there; give a model's directory, a tokenizer.json or a "
            "name on the hub (OWNER/NAME)"
        )
    library = need("tokenizers")
    try:
        # Network, cache and format errors of the hub's client have no common base.
        text = library.Tokenizer.from_pretrained(source).to_str()
    except Exception as error:
        raise ConfigError(f"tokenizer {source} cannot be loaded from the hub: {error}") from error
    return LightTokenizer(text, name=source, sha256=hashlib.sha256(text.encode()).hexdigest())


def need(module: str) -> ModuleType:
    """Imports a module of the extra `tokens`; raises `ConfigError` where it is not installed."""
    # Its own threads would warn at every fork from now on; a text is encoded by one of ours.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"tokens mode needs the package {module} ({error}): {EXTRA_HINT}") from error


def _ids(backend: Any, text: str, add_special_tokens: bool) -> list[int]:
    # Of the library's ways to encode the one that lets other threads run meanwhile: a prompt takes 0.2 s.
    return list(backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def _is_control(token: dict[str, Any]) -> bool:
    # Some vocabularies add runs of spaces and the like beside control tokens: those are text.
    content = token["content"]
    return len(content) > 1 and (bool(token.get("special")) or content.startswith(_TAG_OPENERS))


def _without_control(description: dict[str, Any], control: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The same vocabulary, of which no text spells the tokens `control`."""
    names = description["model"].get("vocab") or {}
    names = names if isinstance(names, dict) else {piece[0] for piece in names}
    added = []
    for token in description.get("added_tokens") or ():
        if token not in control:
            added.append(token)
        elif token["content"] not in names:
            # Renamed, not removed: the ids of those behind it would change.
            added.append({**token, "content": _MARK + secrets.token_hex(16), "normalized": False})
    return {**description, "added_tokens": added, "post_processor": None}


def _break(match: re.Match[str]) -> str:
    return match[0][0] + _BREAK + match[0][1:]


def _eos_token(directory: Path) -> str | None:
    try:
        config = json.loads((directory / "tokenizer_config.json").read_bytes())
        token = config.get("eos_token")
        return token.get("content") if isinstance(token, dict) else token
    except (OSError, ValueError, AttributeError):
        return None


def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    The mapping of GPT-2: printable Latin-1 bytes stand for themselves, the others follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }
