"""A session's calls by their messages: a tree of message lists, and the ids of each call as differences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcroll.contract import Ids
from hpcroll.gateway.chat import Message
from hpcroll.gateway.tokens.messages import call_ids, differences

_NONE = np.zeros(0, dtype=np.uint32)


class Node:
    """A list of messages that some request began with; those that go on from it are its children."""

    __slots__ = ("children", "reply_of", "turns")

    def __init__(self, reply_of: Turn | None = None) -> None:
        self.children: dict[bytes, Node] = {}
        self.turns: list[Turn] = []
        """Calls whose request was this list, oldest first."""
        self.reply_of = reply_of
        """The call whose reply the last message is."""


class Turn:
    """A recorded call. Its ids are the first `keep` of `base` (prompt and sample), `tail`, then `sampled`."""

    __slots__ = (
        "after",
        "base",
        "call_index",
        "keep",
        "length",
        "native",
        "reply",
        "sampled",
        "tail",
        "tools",
    )

    def __init__(self, call_index: int, tools: bytes, base: Turn | None, keep: int, tail: Ids) -> None:
        self.call_index = call_index
        self.tools = tools
        self.base = base
        self.keep = keep
        self.tail = tail
        self.length = keep + len(tail)
        """Of the prompt."""
        self.sampled = _NONE
        self.reply: Message | None = None
        self.native = False
        """The model itself wrote the ids of its tool calls."""
        self.after = Node(self)

    def ids(self, length: int | None = None) -> Ids:
        """The prompt's first `length` ids and beyond them the sampled ones; the whole prompt where None."""
        need = self.length if length is None else length
        pieces = []
        turn: Turn | None = self
        while turn is not None and need > 0:
            if need > turn.length:
                pieces.append(turn.sampled[: need - turn.length])
            if need > turn.keep:
                pieces.append(turn.tail[: min(need, turn.length) - turn.keep])
            need, turn = min(need, turn.keep), turn.base
        return np.concatenate([_NONE, *reversed(pieces)])

    def runs(self, length: int) -> list[tuple[int, int]]:
        """Where sampled ids stand in `ids(length)`: [start, end), ascending."""
        runs = []
        turn: Turn | None = self
        while turn is not None and length > 0:
            if length > turn.length and len(turn.sampled):
                runs.append((turn.length, min(length, turn.length + len(turn.sampled))))
            length, turn = min(length, turn.keep), turn.base
        return runs[::-1]


class MessageList:
    """A request's messages and the nodes they lead along, the root first."""

    __slots__ = ("messages", "nodes", "plain")

    def __init__(self, messages: list[Mapping[str, Any]], plain: list[Message], nodes: list[Node]) -> None:
        self.messages = messages
        self.plain = plain
        self.nodes = nodes

    def beginning(self, length: int) -> MessageList:
        """Its first `length` messages, at most `known`."""
        return MessageList(self.messages[:length], self.plain[:length], self.nodes[: length + 1])

    @property
    def known(self) -> int:
        """How many messages lead somewhere."""
        return len(self.nodes) - 1

    def latest_reply(self) -> tuple[int, Turn | None]:
        """The call whose reply comes last, and how many messages that takes."""
        for index in range(len(self.nodes) - 1, 0, -1):
            if (turn := self.nodes[index].reply_of) is not None:
                return index, turn
        return 0, None

    def latest_call(self, tools: bytes) -> Turn | None:
        """The latest call that asked with these messages and tools."""
        return next((turn for turn in reversed(self.nodes[-1].turns) if turn.tools == tools), None)

    def nearest(self) -> Turn | None:
        """The call that shares most messages with the list."""
        for node in reversed(self.nodes):
            if (turn := node.turns[-1] if node.turns else node.reply_of) is not None:
                return turn
        return None

    def extend(self) -> None:
        """Makes the messages known that are not yet."""
        for message in self.plain[self.known :]:
            self.nodes.append(self.nodes[-1].children.setdefault(digest_of(message), Node()))


def follow(node: Node, message: Message) -> Node | None:
    """Where a plain message leads; an assistant's to the call that gave it, else to itself."""
    if message["role"] == "assistant":
        given = [
            turn
            for turn in reversed(node.turns)
            if turn.reply is not None and not differences(turn.reply, message, native_ids=turn.native)
        ]
        if given:
            # Retries may have said the same: the ids of their tool calls tell them apart, else the latest.
            ids = call_ids(message)
            exact = (turn for turn in given if turn.reply is not None and call_ids(turn.reply) == ids)
            return next(exact, given[0]).after
    return node.children.get(digest_of(message))


def count_repeated(known: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> int:
    """How many messages the two lists begin with in common."""
    length = 0
    for old, new in zip(known, messages, strict=False):
        if old is not new and old != new:
            break
        length += 1
    return length


def digest_of(value: Any) -> bytes:
    """16 bytes that no other value of JSON has, keys in the order they are."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).digest()
