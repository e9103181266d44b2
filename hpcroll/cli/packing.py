"""The commands `hpcroll shards pack` and `hpcroll shards retain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcroll.cli.options import Json, RunDirectory

if TYPE_CHECKING:
    from hpcroll.shards.level1.packer import PackReport
    from hpcroll.shards.level1.retention import RetainReport


def register(group: typer.Typer) -> None:
    """Adds the commands to the group `shards`."""
    group.command()(pack)
    group.command()(retain)


def pack(
    run_dir: RunDirectory,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run is closed.")] = False,
    retain: Annotated[bool, typer.Option("--retain", help="Delete shards that packs hold wholly.")] = False,
    everything: Annotated[
        bool, typer.Option("--everything", help="Also what is committed of incomplete groups.")
    ] = False,
    target_mb: Annotated[float | None, typer.Option(min=0.1, help="MiB at which a pack is closed.")] = None,
    min_mb: Annotated[
        float | None, typer.Option(min=0, help="MiB of shards below which nothing is packed yet.")
    ] = None,
    level: Annotated[int | None, typer.Option(min=1, max=19, help="zstd compression level.")] = None,
    float16: Annotated[
        bool | None, typer.Option("--float16/--float32", help="Log-probabilities in 16 bits.")
    ] = None,
    poll_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two rounds of --follow.")] = 10.0,
    json: Json = False,
) -> int:
    """Rewrite committed groups of the run's shards as packs: smaller, sorted by group, faster to read.

    Any number of packers may run at once, beside workers and trainers, and may be killed at any time. Exit
    status 1 where a committed record is damaged; it is left where it is.
    """
    from dataclasses import asdict, replace

    from hpcroll.cli.output import print_json
    from hpcroll.fs import RunPaths
    from hpcroll.shards.level1.following import follow_packing
    from hpcroll.shards.level1.packer import Packer, PackOptions
    from hpcroll.shards.level1.retention import Retention
    from hpcroll.spool import Spool

    options = PackOptions.of(Spool.open(run_dir).config.shards)
    options = replace(
        options,
        everything=everything,
        target_mb=options.target_mb if target_mb is None else target_mb,
        min_mb=min_mb if min_mb is not None else options.min_mb if follow else 0,
        level=level or options.level,
        float16=options.float16 if float16 is None else float16,
    )
    paths = RunPaths(run_dir)
    packer = Packer(paths, options)
    rounds = follow_packing(
        paths,
        packer,
        retention=Retention(paths) if retain else None,
        poll_s=poll_s,
        stop=lambda: not follow,
    )
    damaged = False
    for done in rounds:
        damaged = bool(done.packed.damaged)
        if json:
            print_json(asdict(done))
        elif not follow or done.packed.packs:
            _print_packed(done.packed)
        if done.retained is not None and not json:
            _print_retained(done.retained)
    return 1 if damaged else 0


def retain(
    run_dir: RunDirectory,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; delete nothing.")] = False,
    without: Annotated[
        list[str] | None, typer.Option("--without", metavar="TRAINER", help="Its cursor does not count.")
    ] = None,
    json: Json = False,
) -> int:
    """Delete shards that packs hold wholly and that no trainer still reads.

    Checks every byte of the packs first. A trainer that is gone for good is named with --without, since a
    cursor only expires for who has watched it (shards pack --follow --retain). Exit status 1 where a pack is
    damaged.
    """
    from dataclasses import asdict

    from hpcroll.cli.output import print_json, progress
    from hpcroll.fs import RunPaths
    from hpcroll.shards.level1.retention import Retention

    with progress("checking packs"):
        report = Retention(RunPaths(run_dir)).retain(dry_run=dry_run, without=without or ())
    if json:
        print_json(asdict(report))
    else:
        _print_retained(report, word="would go" if dry_run else "deleted")
    return 1 if report.problems else 0


def _print_packed(report: PackReport) -> None:
    from dataclasses import asdict

    from hpcroll.cli.output import print_rows, say

    print_rows([asdict(made) for made in report.packs], as_json=False, empty="nothing to pack")
    for damaged in report.damaged:
        say(f"damaged, left where it is: {damaged}")


def _print_retained(report: RetainReport, *, word: str = "deleted") -> None:
    from hpcroll.cli.output import print_rows, say

    rows = [{"shard": name, "stays_because": word} for name in report.deleted]
    rows += [{"shard": name, "stays_because": reason} for name, reason in report.kept.items()]
    print_rows(rows, as_json=False, empty="no shards")
    print(f"{len(report.deleted)} shards {word}, {report.freed_bytes} bytes")
    for problem in report.problems:
        say(f"problem: {problem}")
