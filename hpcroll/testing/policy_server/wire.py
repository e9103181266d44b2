"""What an endpoint must do here: read a request, and write a reply in its own words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hpcroll.testing.policy_server.outgoing import Outgoing
from hpcroll.testing.policy_server.template import Template


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    data: dict[str, Any] | None
    """None: `[DONE]`."""
    sent: int
    """How many ids the client has once it came."""
    ends: bool = False
    """Whether it says how the reply ended: whoever has it has all ids."""


class Wire(Protocol):
    """One endpoint."""

    name: str
    path: str

    def read_prompt(self, body: Mapping[str, Any], template: Template, *, session: str) -> list[int]:
        """The ids of the prompt; raises `ValueError`, `KeyError` or `TypeError` for what it cannot read."""

    def read_max_tokens(self, body: Mapping[str, Any], room: int) -> int | None:
        """How long the reply may be, None for as long as there is room."""

    def whole(self, out: Outgoing) -> dict[str, Any]:
        """The body of a reply in one piece."""

    def events(self, out: Outgoing) -> Iterator[Event]:
        """A streamed reply; each event is made when the one before it was sent."""

    def refuse(self, *, context: int, prompt: int, wanted: int) -> str:
        """The message of status 400 for a prompt and reply that are longer than the context."""


def read_ids(value: Any) -> list[int]:
    """`value` where it is a list of ids, else raises `TypeError`."""
    if not isinstance(value, list) or not value or not all(type(item) is int and item >= 0 for item in value):
        raise TypeError("the prompt must be a list of token ids")
    return value
