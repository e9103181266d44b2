"""The model's vocabulary and chat template: text to token ids and back, both ways exact.

No piece is the beginning of another one, so that a text has one reading only. What the model sampled, decoded
and encoded again, is the same ids: a conversation goes on from the very tokens that were sampled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

END, BASH, SUBMIT = "<end>", "<bash>", "<submit>"
USER, TOOL, ASSISTANT, UNKNOWN = "<user>", "<tool>", "<assistant>", "<unknown>"
COMMAND_BEGIN, COMMAND_END = "echo $((", "))"
_WORDS = ("add", "and", "minus", "over", "times")
SAYABLE = (END, BASH, SUBMIT, *"0123456789+-*/", " ", "\n", COMMAND_BEGIN, COMMAND_END, *_WORDS)
"""Pieces that the model can sample: ids 0 up."""
PIECES = (*SAYABLE, "[exit status 0]", USER, TOOL, ASSISTANT, UNKNOWN)
"""All pieces by id; those behind the sayable ones stand in prompts only."""
ID = {piece: number for number, piece in enumerate(PIECES)}

_MARKS = {END, BASH, SUBMIT, USER, TOOL, ASSISTANT, UNKNOWN}
_PIECE = re.compile("|".join(re.escape(piece) for piece in PIECES if piece not in _MARKS))
_ARGUMENT = {BASH: ("bash", "command"), SUBMIT: ("submit", "answer")}
_MARK_OF_TOOL = {tool: (mark, argument) for mark, (tool, argument) in _ARGUMENT.items()}


def encode(text: str) -> list[int]:
    """The ids of a text without marks; each stretch that no piece fits is one `<unknown>`."""
    ids: list[int] = []
    at = 0
    for match in _PIECE.finditer(text):
        ids += [ID[UNKNOWN]] * (match.start() > at)
        ids.append(ID[match[0]])
        at = match.end()
    return ids + [ID[UNKNOWN]] * (at < len(text))


def decode(ids: Sequence[int]) -> str:
    """The text of `ids`."""
    return "".join(PIECES[token] for token in ids)


def render_prompt(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """A conversation as the model sees it, up to where its reply begins.

    System messages are left out: the tools are all there is, and the model was raised on them.
    Raises `KeyError`, `TypeError` or `ValueError` for messages that are no conversation with these tools.
    """
    ids: list[int] = []
    for message in messages:
        match message["role"]:
            case "user":
                ids += [ID[USER], *encode(message["content"])]
            case "tool":
                ids += [ID[TOOL], *encode(message["content"])]
            case "assistant":
                ids += [ID[ASSISTANT], *encode_reply(message), ID[END]]
            case "system":
                pass
            case role:
                raise ValueError(f"no message can have the role {role!r}")
    return [*ids, ID[ASSISTANT]]


def encode_reply(message: Mapping[str, Any]) -> list[int]:
    """The ids of an assistant message, without `<end>`: its text, then its tool calls."""
    ids = encode(message.get("content") or "")
    for call in message.get("tool_calls") or ():
        mark, argument = _MARK_OF_TOOL[call["function"]["name"]]
        ids += [ID[mark], *encode(json.loads(call["function"]["arguments"])[argument])]
    return ids


def read_reply(ids: Sequence[int], *, call_id: str) -> dict[str, Any]:
    """The assistant message that sampled ids stand for; the inverse of `encode_reply`."""
    body = ids[:-1] if ids and ids[-1] == ID[END] else ids
    text, *parts = re.split(f"({re.escape(BASH)}|{re.escape(SUBMIT)})", decode(body))
    calls = []
    for number, (mark, value) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        tool, argument = _ARGUMENT[mark]
        function = {"name": tool, "arguments": json.dumps({argument: value})}
        calls.append({"id": f"{call_id}-{number}", "type": "function", "function": function})
    return {"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {})}
