"""Commands that start processes: launch, worker."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcroll.cli.options import Json, Leg, RunDirectory


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    app.command()(launch)
    app.command()(worker)


def launch(
    run_dir: RunDirectory,
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="Workers, of each leg.")] = 1,
    leg: Leg = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be submitted.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the workers have ended.")] = False,
    json: Json = False,
) -> int:
    """Start workers with the config's launcher."""
    from hpcroll.api import Run
    from hpcroll.cli.output import print_rows, progress
    from hpcroll.launch import JobState

    run = Run.open(run_dir)
    if dry_run:
        print(run.preview(workers=workers, leg=leg))
        return 0
    with progress("launching" if not wait else "waiting for workers"):
        handles = run.launch(workers=workers, leg=leg, wait=wait)
    rows = [{"job": handle.job_id, "leg": handle.leg, "log": str(handle.log)} for handle in handles]
    print_rows(rows, as_json=json)
    failed = wait and JobState.FAILED in run.job_states(handles)
    return 1 if failed else 0


def worker(
    run_dir: RunDirectory,
    leg: Leg = None,
    rank: Annotated[int, typer.Option(min=0, help="Number of this worker.")] = 0,
) -> int:
    """Be a worker here, until nothing is left to do or a signal comes."""
    from hpcroll.worker.parent import run_rank

    return run_rank(run_dir, leg=leg, rank=rank)
