"""Commands in a task's spec, and what is kept of their output."""

from __future__ import annotations

from hpcroll.sandboxes.base import ExecResult

Command = str | tuple[str, ...]
"""A line for `sh`, or an argument list."""


def command_argv(command: Command) -> tuple[str, ...]:
    """The argument list that runs `command`."""
    return ("sh", "-c", command) if isinstance(command, str) else command


def tail(result: ExecResult, limit: int = 2000) -> str:
    """The end of a command's output, for an error message or a verdict's log."""
    state = "timed out" if result.timed_out else f"exit code {result.exit_code}"
    output = (result.stdout + result.stderr)[-limit:].decode(errors="replace").strip()
    return f"{state}; {output}" if output and limit else state
