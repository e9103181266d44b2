"""The command `demo`."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command()(demo)


def demo() -> int:
    """Run rollouts on this machine with a scripted policy, from submit to the trainer's loop."""
    from hpcroll.testing.demo_run import run_demo

    return run_demo()
