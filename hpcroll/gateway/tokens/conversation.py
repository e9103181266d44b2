"""One session's conversations: which recorded call a request goes on from, and the ids of its prompt."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from hpcroll.contract import Ids
from hpcroll.gateway.tokens.history import MessageList, Node, Turn, count_repeated, digest_of, follow
from hpcroll.gateway.tokens.messages import differences, plain_message
from hpcroll.gateway.tokens.renderer import TokenRenderer
from hpcroll.gateway.tokens.splice import splice
from hpcroll.gateway.tokens.stream import Finished, ReplyStream
from hpcroll.trajectory import common_length

_LISTS = 8
"""Latest message lists that a request is compared with first: a few subagents side by side."""


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
    turn: Turn


class TokenConversation:
    """What one session's agent was told, as ids; any number of conversations side by side.

    Memory is linear in what the agent said and was told: prompts are kept as differences, messages as
    digests.
    All methods may be called from any thread.
    """

    def __init__(self, renderer: TokenRenderer) -> None:
        self._renderer = renderer
        self._root = Node()
        self._lists: deque[MessageList] = deque(maxlen=_LISTS)
        self._latest: deque[Turn] = deque(maxlen=_LISTS)
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
        kit = digest_of(list(tools))
        with self._lock:
            walk = self._walk(messages)
            earlier = walk.latest_call(kit) if walk.known == len(walk.plain) else None
        source: Turn | None
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

    def _bridge(self, walk: MessageList, kit: bytes, tools: Sequence[Any]) -> Ids | None:
        start, base = walk.latest_reply()
        new = walk.plain[start:]
        if base is None or base.tools != kit or not new or any(item["role"] == "assistant" for item in new):
            return None
        whole = base.ids(base.length + len(base.sampled))
        added = self._renderer.bridge(
            whole[: base.length], base.sampled, new, before=walk.plain[:start], tools=tools
        )
        return None if added is None else np.concatenate([whole, np.asarray(added, dtype=np.uint32)])

    def _render(self, walk: MessageList, tools: Sequence[Any]) -> Ids:
        ids = np.asarray(self._renderer.render_plain(walk.plain, tools), dtype=np.uint32)
        if (near := walk.nearest()) is None:
            return ids
        # What the agent did not touch stays as it was sampled: the record forks as late as it can.
        length = near.length + len(near.sampled)
        return splice(near.ids(length), ids, self._renderer.tokenizer, near.runs(length))

    def _remember(
        self, walk: MessageList, kit: bytes, call_index: int, ids: Ids, how: How, source: Turn | None
    ) -> Rendered:
        why, detail = (None, "") if source is not None else self._explain(walk, kit)
        base: Turn | None
        if source is None:
            base, keep = self._closest(ids)
        else:
            base, keep = source, source.length + (len(source.sampled) if how is How.BRIDGED else 0)
        turn = Turn(call_index, kit, base, keep, ids[keep:].copy())
        walk.extend()
        walk.nodes[-1].turns.append(turn)
        self._latest.append(turn)
        self._lists.appendleft(walk)
        return Rendered(ids, how, None if source is None else source.call_index, why, detail, turn)

    def _closest(self, ids: Ids) -> tuple[Turn | None, int]:
        best: Turn | None = None
        longest = 0
        for turn in reversed(self._latest):
            length = common_length(turn.ids(turn.length + len(turn.sampled)), ids)
            if length > longest:
                best, longest = turn, length
        return best, longest

    def _walk(self, messages: Sequence[Mapping[str, Any]]) -> MessageList:
        """Follows the messages through what is known."""
        near, repeated = None, 0
        for known in self._lists:
            length = count_repeated(known.messages, messages)
            if length > repeated:
                near, repeated = known, length
        if near is None:
            walk = MessageList([], [], [self._root])
        else:
            walk = MessageList(
                list(near.messages[:repeated]), near.plain[:repeated], near.nodes[: repeated + 1]
            )
        for index in range(repeated, len(messages)):
            walk.messages.append(messages[index])
            walk.plain.append(plain_message(messages[index], index))
        while walk.known < len(walk.plain):
            node = follow(walk.nodes[-1], walk.plain[walk.known])
            if node is None:
                break
            walk.nodes.append(node)
        return walk

    def _explain(self, walk: MessageList, kit: bytes) -> tuple[Why, str]:
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
