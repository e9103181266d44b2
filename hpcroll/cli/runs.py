"""Commands on a run's submissions: submit, cancel, drain, hold, resume, retry, close."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcroll.cli.options import ConfigFile, Json, Key, NewRunDirectory, Overrides, RunDirectory


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    for command in (submit, cancel, drain, hold, resume, retry, close):
        app.command()(command)


def submit(
    run_dir: NewRunDirectory,
    tasks: Annotated[Path, typer.Argument(metavar="TASKS", help="Task file (JSON lines).")],
    samples: Annotated[int, typer.Option(min=1, help="Rollouts of each task.")] = 1,
    key: Key = None,
    config: ConfigFile = None,
    override: Overrides = None,
    json: Json = False,
) -> None:
    """Submit rollouts of the tasks in a file; the same key twice is one submission.

    With --config the run is created where it does not exist yet. Without --key, the content is the key.
    """
    from hpcroll.api import Run
    from hpcroll.cli.output import print_json, progress

    with progress("checking tasks"):
        run = Run.open(run_dir) if config is None else Run.create(run_dir, config, overrides=override or ())
        submission = run.submit(tasks, samples=samples, key=key)
    segment = submission.segment
    if json:
        print_json(
            {
                "key": submission.key,
                "segment": segment.name,
                "tasks": segment.header.tasks,
                "samples": segment.samples,
                "rollouts": segment.size,
                "created": submission.created,
            }
        )
        return
    what = "submitted" if submission.created else "were submitted before"
    rollouts = f"{segment.size} rollouts of {segment.header.tasks} tasks"
    print(f"{submission.key}: {rollouts} {what} (segment {segment.name})")


def cancel(
    run_dir: RunDirectory,
    key: Key = None,
    rollout: Annotated[str | None, typer.Option("--rollout", help="One rollout, SEGMENT/ORDINAL.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every rollout of the run.")] = False,
) -> None:
    """Cancel rollouts: what nobody runs is committed as cancelled now, the rest by the workers."""
    from hpcroll.api import Run
    from hpcroll.cli.output import progress
    from hpcroll.errors import ConfigError

    if [key is not None, rollout is not None, everything].count(True) != 1:
        raise ConfigError("say what to cancel: one of --key, --rollout or --all")
    with progress("cancelling"):
        count = Run.open(run_dir).cancel(key=key, rollout=rollout)
    print(f"{count} rollouts committed as cancelled; those in progress follow from their workers")


def drain(run_dir: RunDirectory) -> None:
    """Have every worker release what it has and end; waiting jobs leave the queue."""
    from hpcroll.api import Run

    Run.open(run_dir).drain()
    print("draining; `hpcroll launch` starts workers again")


def hold(run_dir: RunDirectory, key: Key = None) -> None:
    """Start nothing more, of one submission or of all, until `resume`."""
    from hpcroll.api import Run

    Run.open(run_dir).hold(key)
    print(f"held: {key or 'everything'}")


def resume(run_dir: RunDirectory, key: Key = None) -> None:
    """Let what is held start again."""
    from hpcroll.api import Run

    Run.open(run_dir).resume(key)
    print(f"resumed: {key or 'everything'}")


def retry(
    run_dir: RunDirectory,
    failed: Annotated[bool, typer.Option("--failed", help="Retry what ended as failed.")] = False,
    key: Key = None,
    json: Json = False,
) -> None:
    """Submit the failed rollouts' tasks again, under key KEY+retryN: a committed result stays as it is."""
    from hpcroll.api import Run
    from hpcroll.cli.output import print_rows
    from hpcroll.errors import ConfigError

    if not failed:
        raise ConfigError("say what to retry: --failed is the only choice")
    submissions = Run.open(run_dir).retry_failed(key)
    rows = [{"key": item.key, "rollouts": item.segment.size, "created": item.created} for item in submissions]
    print_rows(rows, as_json=json, empty="nothing failed that was not retried")


def close(run_dir: RunDirectory) -> None:
    """End the run for good: it takes no submissions, and workers start nothing more."""
    from hpcroll.api import Run

    Run.open(run_dir).close()
    print("closed")
