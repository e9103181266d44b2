"""The command `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command()(demo)


def demo(
    run_dir: Annotated[
        Path | None, typer.Argument(help="Directory of the run; runs/demo-<time> where absent.")
    ] = None,
) -> int:
    """Run rollouts on this machine with a scripted policy, from submit to the trainer's loop."""
    from hpcroll.testing.demo_run import run_demo

    return run_demo(run_dir)
