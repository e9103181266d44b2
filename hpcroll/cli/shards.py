"""Commands on trajectory shards: ls, cat, stats, export, pack, retain, seal, verify."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hpcroll.cli import exporting, packing
from hpcroll.cli.options import Json, RunDirectory

group = typer.Typer(help="Trajectory shards.", no_args_is_help=True)
exporting.register(group)
packing.register(group)


def register(app: typer.Typer) -> None:
    """Adds the group to `app`."""
    app.add_typer(group, name="shards")


@group.command(name="ls")
def list_files(run_dir: RunDirectory, json: Json = False) -> None:
    """List the run's shards and packs: size, committed records, tokens."""
    from hpcroll.cli.output import print_rows, progress
    from hpcroll.report import list_shard_files

    with progress("reading shards"):
        rows = list_shard_files(run_dir)
    print_rows(rows, as_json=json, empty="no shards yet")


@group.command()
def cat(
    run_dir: RunDirectory,
    status: Annotated[str | None, typer.Option(help="Only this status, for example completed.")] = None,
    trainable: Annotated[bool, typer.Option("--trainable", help="Only trainable ones.")] = False,
    full: Annotated[bool, typer.Option("--full", help="The whole record, without tokens.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most so many.")] = None,
) -> None:
    """Print committed trajectories as JSON lines."""
    from itertools import islice

    from hpcroll.report import trajectory_lines

    for line in islice(trajectory_lines(run_dir, status=status, trainable=trainable, full=full), limit):
        print(line)


@group.command()
def stats(
    run_dir: RunDirectory,
    rollouts: Annotated[bool, typer.Option("--rollouts", help="One row per rollout, too.")] = False,
    trainable: Annotated[bool, typer.Option("--trainable", help="Only trainable ones.")] = False,
    json: Json = False,
) -> None:
    """Count what a trainer is given: rows against model calls, tokens, forks and why they began."""
    from hpcroll.cli.output import print_json, print_rows, progress
    from hpcroll.report import row_listing

    with progress("reading shards"):
        listing = row_listing(run_dir, trainable=trainable)
    if json:
        print_json(listing if rollouts else {"total": listing["total"]})
        return
    if rollouts:
        print_rows([_plain(row) for row in listing["rollouts"]], as_json=False)
        print()
    total = _plain(listing["total"])
    print_rows(
        [{"all rollouts": name.replace("_", " "), "": value} for name, value in total.items()], as_json=False
    )


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """`row` with counts by name as one text."""
    return {
        name: ", ".join(f"{key} {count}" for key, count in value.items())
        if isinstance(value, dict)
        else value
        for name, value in row.items()
    }


@group.command()
def seal(
    run_dir: RunDirectory,
    gone: Annotated[
        list[str] | None,
        typer.Option(
            "--gone", metavar="INCARNATION", help="A worker that is dead, on your word; repeatable."
        ),
    ] = None,
    close: Annotated[
        bool, typer.Option("--close", help="Close the run if every rollout has its result.")
    ] = False,
    json: Json = False,
) -> int:
    """Finish what dead workers left: their ends, their index, cancelled rollouts; tell what is open.

    Harmless beside live workers, and repeatable. Exit status 1 where --close could not close.
    """
    from hpcroll.api import Run
    from hpcroll.cli.output import print_json, progress
    from hpcroll.report import seal_lines

    with progress("sealing"):
        report = Run.open(run_dir).seal(gone=gone or (), close=close)
    if json:
        print_json(report.to_dict())
    else:
        for line in seal_lines(report.to_dict()):
            print(line)
    return 1 if close and not report.closed else 0


@group.command()
def verify(run_dir: RunDirectory, json: Json = False) -> int:
    """Check every shard, record and invariant; exit status 1 where one is broken."""
    from dataclasses import asdict

    from hpcroll.cli.output import print_json, progress
    from hpcroll.shards import verify_run

    with progress("verifying"):
        report = verify_run(run_dir)
    counts = asdict(report)
    if json:
        print_json(counts)
    else:
        shown = (f"{name} {value}" for name, value in counts.items() if name != "problems")
        print(", ".join(shown).replace("_", " "))
        for problem in report.problems:
            print(f"problem: {problem}")
    return 0 if report.ok else 1
