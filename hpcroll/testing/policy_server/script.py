"""Scripts: what the server says to which task, turn by turn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal
from unicodedata import normalize

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from hpcroll.errors import ConfigError
from hpcroll.testing.policy_server.faults import Fault


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ToolCall(_Part):
    """One tool call of a reply; arguments as text are sent as they stand, valid JSON or not."""

    name: str
    arguments: dict[str, JsonValue] | str

    def argument_text(self) -> str:
        """The arguments as the client gets them."""
        if isinstance(self.arguments, str):
            return self.arguments
        return json.dumps(self.arguments, ensure_ascii=False)


class Turn(_Part):
    """One reply."""

    text: str = ""
    reasoning: str = ""
    """Thinking before the text, where the template has it (`qwen3`); else it is left out."""
    tools: tuple[ToolCall, ...] = ()
    """Several: called in parallel."""
    bytewise: bool = False
    """Every character beyond ASCII is sampled as one token a byte, and in each event of a stream the first
    one lies across two chunks of the connection."""
    noncanonical: float | None = Field(default=None, ge=0, le=1)
    """Chance of this reply to be tokenised otherwise than its text encodes; None: its behaviour's."""
    usage: dict[str, JsonValue] | None = None
    """Fields that are said instead of the true ones."""
    fault: Fault | None = None
    stall_s: float = Field(default=0.0, ge=0)
    """Seconds before the first token."""


class Aside(_Part):
    """What is said to a side call that ends with a user message which contains `contains`."""

    contains: str = Field(min_length=1)
    text: str


ASIDE_TEXT = "The work on the task goes on as before; there is nothing to add."
COMPACTION_PROMPTS = (
    "CONTEXT CHECKPOINT COMPACTION",
    "create a detailed summary of",
    "structured context checkpoint",
    "generate the <state_snapshot>",
)
"""How coding agents ask for a summary of their history; some offer their tools with it."""


class Behaviour(_Part):
    """A sequence of replies; its last one repeats, or all of them where it loops."""

    name: str
    weight: float = Field(default=1.0, ge=0)
    """How often it is chosen, relative to its siblings."""
    turns: tuple[Turn, ...] = Field(min_length=1)
    loop: bool = False
    count: Literal["messages", "requests"] = "messages"
    """What makes the next turn: a further assistant message (stateless), or a new main request of the
    session (for agents that rewrite their history and make side calls)."""
    aside: str = ASIDE_TEXT
    """Said to a side call; only where requests are counted."""
    asides: tuple[Aside, ...] = tuple(Aside(contains=words, text=ASIDE_TEXT) for words in COMPACTION_PROMPTS)
    """A request that ends with such a user message is a side call, whatever tools it offers."""
    noncanonical: float | None = Field(default=None, ge=0, le=1)
    """Share of replies tokenised otherwise than their text encodes; None: the server's."""

    def turn(self, index: int) -> Turn:
        """The reply to a conversation that holds `index` replies."""
        return self.turns[index % len(self.turns) if self.loop else min(index, len(self.turns) - 1)]


class Script(_Part):
    """What to say to every task one of whose user messages contains `prompt`."""

    prompt: str
    behaviours: tuple[Behaviour, ...] = Field(min_length=1)

    def choose(self, rollout: str, seed: int) -> Behaviour:
        """The behaviour of `rollout`: the same one in every attempt and every process."""
        total = sum(behaviour.weight for behaviour in self.behaviours)
        point = fraction(seed, "behaviour", rollout) * total
        for behaviour in self.behaviours:
            point -= behaviour.weight
            if point < 0:
                return behaviour
        return self.behaviours[-1]


def bash(command: str) -> ToolCall:
    return ToolCall(name="bash", arguments={"command": command})


def submit(answer: str) -> ToolCall:
    return ToolCall(name="submit", arguments={"answer": answer})


UNKNOWN_TASK = Script(
    prompt="",
    behaviours=(
        Behaviour(name="unknown_task", turns=(Turn(text="No script for this task.", tools=(submit(""),)),)),
    ),
)
"""What is said to a task that no script names."""


def solves(commands: Sequence[str], answer: str, *, weight: float = 1.0, name: str = "solves") -> Behaviour:
    """Runs `commands` one by one, then submits `answer`."""
    steps = [
        Turn(text=f"Step {number} of {len(commands)}.", tools=(bash(command),))
        for number, command in enumerate(commands, start=1)
    ]
    last = Turn(text="This is my answer.", tools=(submit(answer),))
    return Behaviour(name=name, weight=weight, turns=(*steps, last))


def fails(
    commands: Sequence[str] = ("ls",), answer: str = "I do not know", *, weight: float = 1.0
) -> Behaviour:
    """Works, and submits a wrong answer."""
    return solves(commands, answer, weight=weight, name="fails")


def loops(command: str = "ls", *, weight: float = 1.0) -> Behaviour:
    """Says the same for ever."""
    turn = Turn(text="Let me look again.", tools=(bash(command),))
    return Behaviour(name="loops", weight=weight, turns=(turn,), loop=True)


def stalls(stall_s: float, *, weight: float = 1.0) -> Behaviour:
    """Takes `stall_s` seconds over every reply."""
    turn = Turn(text="I am thinking.", tools=(bash("true"),), stall_s=stall_s)
    return Behaviour(name="stalls", weight=weight, turns=(turn,), loop=True)


def garbage(*, weight: float = 1.0) -> Behaviour:
    """Broken arguments, an unknown tool, no tool at all, odd characters; then an empty submission."""
    turns = (
        Turn(text="", tools=(ToolCall(name="bash", arguments='{"command": "ls'),)),
        Turn(text="", tools=(ToolCall(name="no_such_tool", arguments={"x": 1}),)),
        Turn(text="\u0000\u202e\U0001f9e8 <tool>{]}}</tool> \ufffd" * 3),
        Turn(text="", tools=(ToolCall(name="bash", arguments="[1, 2]"),)),
        Turn(text="", tools=(ToolCall(name="bash", arguments={"command": 7}),)),
        Turn(text="", tools=(submit(""),)),
    )
    return Behaviour(name="garbage", weight=weight, turns=turns)


def find_script(scripts: Iterable[Script], user_messages: Iterable[str]) -> Script:
    """The script with the longest prompt that a message contains, `UNKNOWN_TASK` where none fits.

    Both are compared in Unicode's composed form, which some tokenizers write all text in.
    """
    messages = [normalize("NFC", message) for message in user_messages]
    fitting = [
        script
        for script in scripts
        if any(normalize("NFC", script.prompt) in message for message in messages)
    ]
    return max(fitting, key=lambda script: len(script.prompt), default=UNKNOWN_TASK)


def load_scripts(path: Path) -> tuple[Script, ...]:
    """The scripts of a JSONL file, one object a line; raises `ConfigError` that names the broken line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"scripts {path} cannot be read: {error}") from error
    scripts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            scripts.append(Script.model_validate_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"scripts {path} line {number}: {where or 'object'}: {first['msg']}") from error
    return tuple(scripts)


def write_scripts(scripts: Iterable[Script], path: Path) -> None:
    """Writes `scripts` as `load_scripts` reads them."""
    path.write_text("".join(script.model_dump_json() + "\n" for script in scripts), encoding="utf-8")


def fraction(seed: int, *parts: object) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    return number(seed, *parts) / 2**64


def number(seed: int, *parts: object) -> int:
    """A 64-bit number that depends on nothing but its arguments."""
    text = json.dumps([seed, *parts], default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
