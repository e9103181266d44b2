"""The chat template of Qwen3, through the package `renderers`, over the small tokenizer.

Thinking of replies before the last user message is left out of later prompts, as the real one does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any
from unicodedata import normalize

from hpcroll.errors import ConfigError
from hpcroll.testing.policy_server.template import (
    Draft,
    Part,
    PartKind,
    PromptView,
    TemplateError,
    read_json,
    text_of,
    tool_names,
)
from hpcroll.testing.tiny_tokenizer import SPECIAL_TOKENS, TinyTokenizer, tiny_tokenizer

_ROLES = frozenset({"system", "user", "assistant", "tool"})


class TinyTokens:
    """The `Vocabulary` of the small tokenizer."""

    def __init__(self, tokenizer: TinyTokenizer) -> None:
        self._tokenizer = tokenizer
        self._control = {int(token_id) for token_id in tokenizer.backend.get_added_tokens_decoder()}
        self._pieces = _read_pieces(tokenizer, self._control)
        self._ids = {
            piece: token_id for token_id, piece in self._pieces.items() if token_id not in self._control
        }

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def piece(self, token_id: int) -> bytes:
        return self._pieces.get(token_id, b"")

    def id_of(self, piece: bytes) -> int | None:
        return self._ids.get(piece)

    def is_text(self, token_id: int) -> bool:
        return token_id not in self._control

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, all control tokens spelt out."""
        return self._tokenizer.decode(ids)


class Qwen3Template:
    """A `Template`; raises `ConfigError` where `renderers` or `tokenizers` is not installed."""

    strips_newlines = True

    def __init__(self) -> None:
        tokenizer = tiny_tokenizer()
        self.vocabulary = TinyTokens(tokenizer)
        self._renderer = _load_renderer(tokenizer)
        self._id = tokenizer.backend.token_to_id

    def render_prompt(self, request: Mapping[str, Any], *, session: str) -> list[int]:
        messages = [_as_known(message) for message in request["messages"]]
        if not messages:
            raise TemplateError("no messages")
        tools = request.get("tools") or None
        return list(self._renderer.render_ids(messages, tools=tools, add_generation_prompt=True))

    def as_read(self, text: str) -> str:
        return normalize("NFC", text)

    def render_reply(self, draft: Draft) -> list[Part]:
        body = draft.text + ("\n" if draft.text and draft.tool_calls else "")
        parts = []
        if draft.reasoning:
            parts += [
                self._mark("<think>"),
                self._part(PartKind.REASONING, f"\n{draft.reasoning}\n"),
                self._mark("</think>"),
            ]
            body = "\n\n" + body
        parts.append(self._part(PartKind.TEXT, body))
        for place, call in enumerate(draft.tool_calls):
            function = call["function"]
            text = f'\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n'
            parts += [
                *([self._part(PartKind.MARK, "\n")] if place else []),
                self._mark("<tool_call>"),
                self._part(PartKind.CALLS, text, (place,)),
                self._mark("</tool_call>"),
            ]
        return [*parts, self._mark("<|im_end|>")]

    def read_prompt(self, ids: Sequence[int]) -> PromptView:
        text = self.vocabulary.decode(ids)
        # What follows the last mark is the beginning of the reply.
        *messages, _ = [turn.partition("\n") for turn in text.split("<|im_start|>")[1:]] or [("", "", "")]
        users = [
            (place, body.removesuffix("\n").removesuffix("<|im_end|>"))
            for place, (role, _, body) in enumerate(messages)
            if role == "user" and not body.lstrip("\n").startswith("<tool_response>")
        ]
        last = max((place for place, turn in enumerate(messages) if turn[0] != "system"), default=-1)
        lists = text.partition("<tools>\n")[2].partition("\n</tools>")[0] if "<tools>\n" in text else ""
        return PromptView(
            user_messages=tuple(body for _, body in users),
            last_user=users[-1][1] if users and users[-1][0] == last else "",
            tools=tool_names([read_json(line) for line in lists.split("\n")]),
            replies=sum(role == "assistant" for role, _, _ in messages),
        )

    def remember(self, session: str, prompt: Sequence[int], draft: Draft, sampled: Sequence[int]) -> None:
        """Nothing: ids are kept by whoever uses the endpoints that take ids."""

    def _mark(self, token: str) -> Part:
        return Part(PartKind.MARK, (self._id(token),))

    def _part(self, kind: PartKind, text: str, calls: tuple[int, ...] = ()) -> Part:
        return Part(kind, tuple(self.vocabulary.encode(text)), calls)


def _load_renderer(tokenizer: TinyTokenizer) -> Any:
    try:
        return import_module("renderers.qwen3").Qwen3Renderer(tokenizer)
    except ImportError as error:
        raise ConfigError(
            f"the template qwen3 needs the package renderers: pip install 'hpcroll[testing,tokens]' ({error})"
        ) from None


def _as_known(message: Mapping[str, Any]) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" else message["role"]
    if role not in _ROLES:
        raise TemplateError(f"no template for a message of role {role!r}")
    return {**message, "role": role, "content": text_of(message)}


def _read_pieces(tokenizer: TinyTokenizer, control: set[int]) -> dict[int, bytes]:
    # Byte-level vocabularies spell bytes that are no printable characters as other ones.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    spelt = {chr(byte): byte for byte in printable}
    spelt |= {chr(0x100 + place): byte for place, byte in enumerate(others)}
    pieces = {}
    for token, token_id in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        if token_id in control:
            pieces[token_id] = b"" if token in SPECIAL_TOKENS else token.encode()
        else:
            pieces[token_id] = bytes(spelt[character] for character in token)
    return pieces
