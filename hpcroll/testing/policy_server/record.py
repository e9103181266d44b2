"""The log of what was sampled: what every record of it must equal, id for id."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

DONE, CLIENT_GONE, FAULT = "done", "client_gone", "fault"


@dataclass(frozen=True, slots=True)
class Sampled:
    """One reply as the server made it."""

    request_id: str
    session: str
    behaviour: str
    turn: int
    kind: str
    """`main`, or `side`: an answer outside of the script."""
    wire: str
    """Which endpoint: `chat`, `completions`, `vllm_generate`, `sglang_generate`."""
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Each exactly a float32."""
    finish_reason: str
    version: int
    """Policy version when the reply began."""
    canonical: bool
    version_end: int
    """Policy version when its last id was sent."""
    sent: int = 0
    """How many ids were handed to the connection."""
    ended: str = ""
    """`done`, `client_gone` (or the server stopped), `fault`; empty while the reply is under way."""
    fault: str | None = None
    """The kind of the fault that struck it."""


class Record:
    """Replies by the time they began; or, with a path, JSON lines by the time they ended.

    A line is written before the event that ends the reply leaves: whatever a client knows to be whole is
    in the file.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.sampled: list[Sampled] = []

    def begin(self, sampled: Sampled) -> Entry:
        place = None
        if self._path is None:
            place = len(self.sampled)
            self.sampled.append(sampled)
        return Entry(self, sampled, place)

    def _end(self, sampled: Sampled, place: int | None) -> None:
        if place is not None:
            self.sampled[place] = sampled
        elif self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(sampled)) + "\n")


class Entry:
    """The record of one reply, until it ends; ending it again changes nothing."""

    def __init__(self, record: Record, sampled: Sampled, place: int | None) -> None:
        self._record = record
        self._place = place
        self.sampled = sampled

    def end(self, ended: str, *, sent: int, version: int) -> None:
        if not self.sampled.ended:
            self.sampled = replace(self.sampled, ended=ended, sent=sent, version_end=version)
            self._record._end(self.sampled, self._place)
