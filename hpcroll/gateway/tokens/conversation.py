"""One session's conversations: which recorded call a request goes on from, and the ids of its prompt."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from hpcroll.contract import Ids
from hpcroll.gateway.chat import Message
from hpcroll.gateway.tokens.messages import call_ids, differences, plain_message
from hpcroll.gateway.tokens.renderer import TokenRenderer
from hpcroll.gateway.tokens.splice import splice
from hpcroll.gateway.tokens.stream import Finished, ReplyStream
from hpcroll.trajectory import common_length

_LISTS = 8
"""Latest message lists that a request is compared with first: a few subagents side by side."""
_NONE = np.zeros(0, dtype=np.uint32)


class How(StrEnum):
    """How a prompt came about."""

    BRIDGED = "bridged"
    """It goes on from a recorded call: that call's prompt and sampled ids, then the new messages."""
    REPEATED = "repeated"
    """The very prompt of an earlier call with the same messages."""
    RENDERED = "rendered"
    """The whole list of messages was rendered; what comes before the change stands in recorded ids."""


class Why(StrEnum):
    """Why a prompt was rendered instead of bridged."""

    START = "start"
    """A conversation begins."""
    TOOLS_CHANGED = "tools_changed"
    HISTORY_REWRITTEN = "history_rewritten"
    """Messages that no reply came from changed: a compaction, an edited tool result."""
    REPLY_EDITED = "reply_edited"
    """A reply came back other than it was given."""
    REPLY_UNKNOWN = "reply_unknown"
    """An assistant message that no recorded call gave."""
    THINKING_DROPPED = "thinking_dropped"
    """The template drops earlier thinking at a new user message."""
    BRIDGE_REFUSED = "bridge_refused"
    """The template cannot go on from the reply as it was sampled, for example within its thinking."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The prompt of one call."""

    ids: Ids
    """uint32 (P,)."""
    how: How
    from_call: int | None
    """The call that it goes on from, or whose prompt it repeats."""
    why: Why | None
    """None unless `how` is RENDERED."""
    detail: str
    """What differed, for people."""
    turn: _Turn


class _Node:
    """A list of messages that some request began with; those that go on from it are its children."""

    __slots__ = ("children", "reply_of", "turns")

    def __init__(self, reply_of: _Turn | None = None) -> None:
        self.children: dict[bytes, _Node] = {}
        self.turns: list[_Turn] = []
        """Calls whose request was this list, oldest first."""
        self.reply_of = reply_of
        """The call whose reply the last message is."""


class _Turn:
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

    def __init__(self, call_index: int, tools: bytes, base: _Turn | None, keep: int, tail: Ids) -> None:
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
        self.after = _Node(self)

    def ids(self, length: int | None = None) -> Ids:
        """The prompt's first `length` ids and beyond them the sampled ones; the whole prompt where None."""
        need = self.length if length is None else length
        pieces = []
        turn: _Turn | None = self
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
        turn: _Turn | None = self
        while turn is not None and length > 0:
            if length > turn.length and len(turn.sampled):
                runs.append((turn.length, min(length, turn.length + len(turn.sampled))))
            length, turn = min(length, turn.keep), turn.base
        return runs[::-1]


class TokenConversation:
    """What one session's agent was told, as ids; any number of conversations side by side.

    Memory is linear in what the agent said and was told: prompts are kept as differences, messages as
    digests.
    All methods may be called from any thread.
    """

    def __init__(self, renderer: TokenRenderer) -> None:
        self._renderer = renderer
        self._root = _Node()
        self._lists: deque[_List] = deque(maxlen=_LISTS)
        self._latest: deque[_Turn] = deque(maxlen=_LISTS)
        self._lock = threading.Lock()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply."""
        return self._renderer.stop_ids

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), *, call_index: int
    ) -> Rendered:
        """The prompt for a request, remembered as call `call_index`.

        Where the messages begin with those of a recorded call and the reply it gave, the prompt begins with
        the ids of that call, sampled ones included. Raises `CannotRenderError`; then nothing is remembered.
        """
        kit = _digest(list(tools))
        with self._lock:
            walk = self._walk(messages)
            earlier = walk.latest_call(kit) if walk.known == len(walk.plain) else None
        source: _Turn | None
        if earlier is not None:
            ids, how, source = earlier.ids(), How.REPEATED, earlier
        elif (bridged := self._bridge(walk, kit, tools)) is not None:
            ids, how, source = bridged, How.BRIDGED, walk.latest_reply()[1]
        else:
            ids, how, source = self._render(walk, tools), How.RENDERED, None
        with self._lock:
            return self._remember(walk, kit, call_index, ids, how, source)

    def stream(
        self, rendered: Rendered, tools: Sequence[Any] = (), *, stop: Sequence[str] = ()
    ) -> ReplyStream:
        """Reads the reply to `rendered`."""
        return ReplyStream(self._renderer, rendered.ids, tools, stop=stop)

    def reply(self, rendered: Rendered, finished: Finished) -> None:
        """Remembers what was sampled and the message that the agent is shown of it.

        Once per call, before the agent has the reply's end, since it may go on at once; not for a call whose
        reply the agent will never see whole.
        """
        turn = rendered.turn
        with self._lock:
            turn.sampled = np.asarray(finished.ids, dtype=np.uint32)
            turn.reply = plain_message(finished.message, 0)
            turn.native = finished.native_ids

    def count(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> int:
        """How many tokens the prompt would have if it were rendered; nothing is remembered."""
        return len(self._renderer.render(messages, tools))

    def _bridge(self, walk: _List, kit: bytes, tools: Sequence[Any]) -> Ids | None:
        start, base = walk.latest_reply()
        new = walk.plain[start:]
        if base is None or base.tools != kit or not new or any(item["role"] == "assistant" for item in new):
            return None
        whole = base.ids(base.length + len(base.sampled))
        added = self._renderer.bridge(
            whole[: base.length], base.sampled, new, before=walk.plain[:start], tools=tools
        )
        return None if added is None else np.concatenate([whole, np.asarray(added, dtype=np.uint32)])

    def _render(self, walk: _List, tools: Sequence[Any]) -> Ids:
        ids = np.asarray(self._renderer.render_plain(walk.plain, tools), dtype=np.uint32)
        if (near := walk.nearest()) is None:
            return ids
        # What the agent did not touch stays as it was sampled: the record forks as late as it can.
        length = near.length + len(near.sampled)
        return splice(near.ids(length), ids, self._renderer.tokenizer, near.runs(length))

    def _remember(
        self, walk: _List, kit: bytes, call_index: int, ids: Ids, how: How, source: _Turn | None
    ) -> Rendered:
        why, detail = (None, "") if source is not None else self._explain(walk, kit)
        base: _Turn | None
        if source is None:
            base, keep = self._closest(ids)
        else:
            base, keep = source, source.length + (len(source.sampled) if how is How.BRIDGED else 0)
        turn = _Turn(call_index, kit, base, keep, ids[keep:].copy())
        walk.extend()
        walk.nodes[-1].turns.append(turn)
        self._latest.append(turn)
        self._lists.appendleft(walk)
        return Rendered(ids, how, None if source is None else source.call_index, why, detail, turn)

    def _closest(self, ids: Ids) -> tuple[_Turn | None, int]:
        best: _Turn | None = None
        longest = 0
        for turn in reversed(self._latest):
            length = common_length(turn.ids(turn.length + len(turn.sampled)), ids)
            if length > longest:
                best, longest = turn, length
        return best, longest

    def _walk(self, messages: Sequence[Mapping[str, Any]]) -> _List:
        """Follows the messages through what is known."""
        near, repeated = None, 0
        for known in self._lists:
            length = _repeated(known.messages, messages)
            if length > repeated:
                near, repeated = known, length
        if near is None:
            walk = _List([], [], [self._root])
        else:
            walk = _List(list(near.messages[:repeated]), near.plain[:repeated], near.nodes[: repeated + 1])
        for index in range(repeated, len(messages)):
            walk.messages.append(messages[index])
            walk.plain.append(plain_message(messages[index], index))
        while walk.known < len(walk.plain):
            node = _follow(walk.nodes[-1], walk.plain[walk.known])
            if node is None:
                break
            walk.nodes.append(node)
        return walk

    def _explain(self, walk: _List, kit: bytes) -> tuple[Why, str]:
        """Why no recorded call can be gone on from."""
        start, base = walk.latest_reply()
        new = walk.plain[start:]
        strange = next((start + at for at, item in enumerate(new) if item["role"] == "assistant"), None)
        if strange is None:
            if base is None:
                return Why.START, ""
            if base.tools != kit:
                return Why.TOOLS_CHANGED, f"since call {base.call_index}"
            if self._renderer.drops_thinking(new):
                return Why.THINKING_DROPPED, f"thinking_retention is {self._renderer.thinking_retention}"
            return Why.BRIDGE_REFUSED, f"after call {base.call_index}"
        if walk.known == 0:
            return Why.START, "with a history that no call gave"
        if walk.known < strange and walk.nodes[-1].children:
            return Why.HISTORY_REWRITTEN, f"messages[{walk.known}] ({walk.plain[walk.known]['role']})"
        asked = walk.nodes[strange].turns if strange <= walk.known else ()
        given = [turn for turn in asked if turn.reply is not None]
        if not given:
            return Why.REPLY_UNKNOWN, f"messages[{strange}]"
        last = given[-1]
        assert last.reply is not None
        fields = differences(last.reply, walk.plain[strange], native_ids=last.native)
        return Why.REPLY_EDITED, f"messages[{strange}]: {', '.join(fields)} of call {last.call_index}"


class _List:
    """A request's messages and the nodes they lead along, the root first."""

    __slots__ = ("messages", "nodes", "plain")

    def __init__(self, messages: list[Mapping[str, Any]], plain: list[Message], nodes: list[_Node]) -> None:
        self.messages = messages
        self.plain = plain
        self.nodes = nodes

    @property
    def known(self) -> int:
        """How many messages lead somewhere."""
        return len(self.nodes) - 1

    def latest_reply(self) -> tuple[int, _Turn | None]:
        """The call whose reply comes last, and how many messages that takes."""
        for index in range(len(self.nodes) - 1, 0, -1):
            if (turn := self.nodes[index].reply_of) is not None:
                return index, turn
        return 0, None

    def latest_call(self, tools: bytes) -> _Turn | None:
        """The latest call that asked with these messages and tools."""
        return next((turn for turn in reversed(self.nodes[-1].turns) if turn.tools == tools), None)

    def nearest(self) -> _Turn | None:
        """The call that shares most messages with the list."""
        for node in reversed(self.nodes):
            if (turn := node.turns[-1] if node.turns else node.reply_of) is not None:
                return turn
        return None

    def extend(self) -> None:
        """Makes the messages known that are not yet."""
        for message in self.plain[self.known :]:
            self.nodes.append(self.nodes[-1].children.setdefault(_digest(message), _Node()))


def _follow(node: _Node, message: Message) -> _Node | None:
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
    return node.children.get(_digest(message))


def _repeated(known: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> int:
    length = 0
    for old, new in zip(known, messages, strict=False):
        if old is not new and old != new:
            break
        length += 1
    return length


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).digest()
