"""The tools of the react agent: their schemas, the calls it makes, and what it is shown."""

from __future__ import annotations

import json
from typing import Any

from hpcroll.sandboxes.base import ExecResult

BASH, SUBMIT = "bash", "submit"

_ARGUMENTS = {BASH: "command", SUBMIT: "answer"}


def _tool(name: str, description: str, argument: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {_ARGUMENTS[name]: {"type": "string", "description": argument}},
        "required": [_ARGUMENTS[name]],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    _tool(BASH, "Runs a command in a shell and shows its output and exit status.", "The command."),
    _tool(SUBMIT, "Hands in the answer and ends the work.", "The answer; empty where none is asked for."),
]


class BadCallError(ValueError):
    """A tool call that cannot be run; the text is for the agent."""


def read_call(call: Any) -> tuple[str, str]:
    """The tool's name and its one argument; raises `BadCallError` that says what is wrong."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise BadCallError("it has no function")
    name = function.get("name")
    if name not in _ARGUMENTS:
        raise BadCallError(f"there is no tool {name!r:.80}; the tools are {', '.join(_ARGUMENTS)}")
    wanted = _ARGUMENTS[name]
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError, RecursionError) as error:
        raise BadCallError(f"its arguments are not JSON: {error}") from None
    value = arguments.get(wanted) if isinstance(arguments, dict) else None
    if not isinstance(value, str):
        raise BadCallError(f'its arguments must be an object with the string "{wanted}"')
    if name == BASH and "\0" in value:
        raise BadCallError("a command cannot hold a NUL character")
    return name, value


def show_result(result: ExecResult, *, timeout_s: float) -> str:
    """What the agent sees of a command: output, errors, and how it ended."""
    parts = [_show(result.stdout, result.stdout_bytes)]
    if result.stderr_bytes:
        parts.append(f"[stderr]\n{_show(result.stderr, result.stderr_bytes)}")
    if result.timed_out:
        parts.append(f"[killed after {timeout_s:g} s]")
    elif result.exit_code is None:
        parts.append("[killed]")
    elif result.exit_code < 0:
        parts.append(f"[killed by signal {-result.exit_code}]")
    else:
        parts.append(f"[exit status {result.exit_code}]")
    return "\n".join(part for part in parts if part)


def _show(stream: bytes, total_bytes: int) -> str:
    missing = total_bytes - len(stream)
    if missing <= 0:
        return _text(stream)
    # The sandbox kept the beginning and the end; the marker stands where the middle was.
    half = (len(stream) + 1) // 2
    return f"{_text(stream[:half])}\n[... {missing} bytes left out ...]\n{_text(stream[half:])}"


def _text(stream: bytes) -> str:
    return stream.decode("utf-8", errors="replace").rstrip("\n")
