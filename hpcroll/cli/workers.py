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
    """Start workers with the config's launcher; with --wait, seal the run once they have ended."""
    from hpcroll.api import Run
    from hpcroll.cli.output import print_rows, progress, say
    from hpcroll.launch import JobState
    from hpcroll.report import seal_lines

    run = Run.open(run_dir)
    if dry_run:
        print(run.preview(workers=workers, leg=leg))
        return 0
    with progress("launching"):
        handles = run.launch(workers=workers, leg=leg)
    rows = [{"job": handle.job_id, "leg": handle.leg, "log": str(handle.log)} for handle in handles]
    print_rows(rows, as_json=json)
    if not wait:
        return 0
    try:
        with progress("waiting for workers"):
            report = run.wait(handles)
    except KeyboardInterrupt:
        say(
            f"the workers go on; once they have ended, `hpcroll shards seal {run_dir}` does what --wait would"
        )
        raise
    for line in seal_lines(report.to_dict()):
        say(line)
    return 1 if JobState.FAILED in run.job_states(handles) else 0


def worker(
    run_dir: RunDirectory,
    leg: Leg = None,
    rank: Annotated[int, typer.Option(min=0, help="Number of this worker.")] = 0,
) -> int:
    """Be a worker here, until nothing is left to do or a signal comes."""
    from hpcroll.worker.parent import run_rank

    return run_rank(run_dir, leg=leg, rank=rank)
