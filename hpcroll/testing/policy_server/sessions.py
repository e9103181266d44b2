"""Which turn a request gets: what the server remembers of each session."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcroll.testing.policy_server.faults import Fault
from hpcroll.testing.policy_server.script import (
    COMPACTION_PROMPTS,
    UNKNOWN_TASK,
    Behaviour,
    Script,
    Turn,
    find_script,
)
from hpcroll.testing.policy_server.template import PromptView

MAIN, SIDE = "main", "side"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a request is answered with."""

    behaviour: Behaviour
    index: int
    """Of the turn; of a side call: of the turn that is still to come."""
    turn: Turn
    kind: str
    """`main` or `side`."""
    identity: tuple[str, ...]
    """Equal identities give equal samples."""
    mark: Mark | None
    """Told how the reply ended, where requests are counted."""


@dataclass(slots=True)
class Mark:
    """One turn that was given to one prompt."""

    index: int
    delivered: bool | None = None
    """False where no reply reached the client whole; None while the first one is under way."""

    def end(self, *, whole: bool) -> None:
        self.delivered = self.delivered or whole


@dataclass(slots=True)
class _Play:
    """How far one script got in one session."""

    behaviour: Behaviour
    given: dict[bytes, Mark] = field(default_factory=dict)
    """By prompt."""
    last: Mark | None = None
    samples: int = 0


class Sessions:
    """The scripts as they are played, session by session."""

    def __init__(self, scripts: Sequence[Script], seed: int) -> None:
        self._scripts = scripts
        self._seed = seed
        self._counts_requests = any(
            behaviour.count == "requests" for script in scripts for behaviour in script.behaviours
        )
        self._plays: dict[str, dict[str, _Play]] = {}
        self._struck: Counter[tuple[str, str, int]] = Counter()

    def choose(self, session: str, prompt: Sequence[int], view: PromptView) -> Choice:
        """The answer to `prompt`.

        Where requests are counted, a prompt that was seen before gets its turn again and a new one the
        next turn, or the last turn where that did not reach the client; a request that does not offer
        the tools of the turn, or ends as one of the behaviour's asides, is a side call.
        """
        plays = self._plays.setdefault(session, {})
        script = find_script(self._scripts, view.user_messages)
        if script is UNKNOWN_TASK and plays:
            # A compacted history need not hold the task's own words any more.
            play = next(iter(plays.values()))
        else:
            # Attempts of one rollout play one behaviour; the gateway names a session ROLLOUT.ATTEMPT.
            rollout = session.rpartition(".")[0] or session
            behaviour = script.choose(rollout, self._seed)
            if behaviour.count == "messages":
                return self._by_messages(session, script, behaviour, view)
            play = plays.setdefault(script.prompt, _Play(behaviour))
        return self._by_requests(session, play, prompt, view)

    def forget_prompts(self, session: str) -> None:
        """The session's history is about to be rewritten: prompts that were seen before are new ones then.

        Else an agent whose compacted history equals an earlier prompt would get the turn that made it too
        long again, for ever.
        """
        for play in self._plays.get(session, {}).values():
            play.given.clear()

    def fault_of(self, session: str, choice: Choice) -> Fault | None:
        """The fault that strikes now, counted as struck."""
        fault = choice.turn.fault
        key = (session, choice.behaviour.name, choice.index)
        if fault is None or self._struck[key] >= fault.times:
            return None
        self._struck[key] += 1
        return fault

    def _by_messages(self, session: str, script: Script, behaviour: Behaviour, view: PromptView) -> Choice:
        index = view.replies
        turn = behaviour.turn(index)
        if script is UNKNOWN_TASK and self._counts_requests and not _offers(view, turn):
            turn = Turn(text=behaviour.aside)
            return Choice(behaviour, index, turn, SIDE, (session, "aside", str(index)), None)
        return Choice(behaviour, index, turn, MAIN, (session, str(index)), None)

    def _by_requests(self, session: str, play: _Play, prompt: Sequence[int], view: PromptView) -> Choice:
        behaviour = play.behaviour
        key = hashlib.blake2b(array("I", prompt).tobytes(), digest_size=16).digest()
        mark = play.given.get(key)
        if mark is None:
            index = 0 if play.last is None else play.last.index + (play.last.delivered is not False)
        else:
            index = mark.index
        turn = behaviour.turn(index)
        play.samples += 1
        identity = (session, behaviour.name, str(index), str(play.samples))
        aside = next((aside.text for aside in behaviour.asides if aside.contains in view.last_user), None)
        if any(words in view.last_user for words in COMPACTION_PROMPTS):
            self.forget_prompts(session)
        uses_tools = any(turn.tools for turn in behaviour.turns)
        if aside is None and (not _offers(view, turn) or (uses_tools and not view.tools)):
            aside = behaviour.aside
        if aside is not None:
            return Choice(behaviour, index, Turn(text=aside), SIDE, identity, None)
        if mark is None:
            mark = play.given[key] = play.last = Mark(index)
        return Choice(behaviour, index, turn, MAIN, identity, mark)


def _offers(view: PromptView, turn: Turn) -> bool:
    return all(call.name in view.tools for call in turn.tools)
