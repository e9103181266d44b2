"""Runs the scheduler's programs: an argv list, a time-out, and their own words on failure."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpcroll.errors import LaunchError

TIMEOUT_S = 60.0
"""Longest that a scheduler's program may take: a busy controller answers late, a dead one never."""


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """What a program said; `exit_code` is negative for a signal."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def words(self) -> str:
        """One line of what went wrong, for an error message."""
        text = " ".join((self.stderr or self.stdout).split())
        return text[:500] or f"exit status {self.exit_code}"


RunCommand = Callable[[Sequence[str]], CommandOutput]


def run_command(
    argv: Sequence[str], *, timeout_s: float = TIMEOUT_S, env: Mapping[str, str] | None = None
) -> CommandOutput:
    """Runs `argv` in its own process group; raises `LaunchError` where it is absent or takes too long."""
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"{argv[0]} cannot be run: {error.strerror}; is it on PATH here?") from error
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # The whole group: Slurm's programs may be wrapped by a site's script.
            os.killpg(process.pid, signal.SIGKILL)
            raise LaunchError(f"{argv[0]} did not answer within {timeout_s:g} s; try again later") from None
    return CommandOutput(process.returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace"))
