"""Commands that look at a run: status, show, logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcroll.cli.options import Json, RunDirectory


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    app.command()(status)
    app.command()(show)
    app.command()(logs)


def status(
    run_dir: RunDirectory,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until all is done.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Count names, not heartbeats.")] = False,
    json: Json = False,
    every_s: Annotated[float, typer.Option("--every-s", min=0.2, help="Seconds between refreshes.")] = 2.0,
) -> None:
    """How far the run is: stages, rates, failures, workers, time left."""
    from hpcroll.api import Run
    from hpcroll.cli.output import print_json
    from hpcroll.report import print_status, watch_status

    run = Run.open(run_dir)
    if watch:
        watch_status(lambda: run.status(exact=exact), every_s=every_s)
    elif json:
        print_json(run.status(exact=exact).to_dict())
    else:
        print_status(run.status(exact=exact))


def show(
    run_dir: RunDirectory,
    rollout: Annotated[str, typer.Argument(metavar="ROLLOUT", help="SEGMENT/ORDINAL.")],
    tokens: Annotated[bool, typer.Option("--tokens", help="Tokens in place of turns.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="Directory with tokenizer.json: tokens as text.")
    ] = None,
    segment: Annotated[int | None, typer.Option("--segment", min=0, help="One segment.")] = None,
    call: Annotated[int | None, typer.Option("--call", min=0, help="One model call.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="One line per token.")] = False,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="This attempt, from its journal.")
    ] = None,
    json: Json = False,
) -> None:
    """Show one trajectory: outcome, segments, turns or tokens, policies, verdict, timing.

    Of a rollout without a result, what the journal holds of its latest attempt, marked as PARTIAL.
    """
    from hpcroll.api import Run
    from hpcroll.cli.output import print_json
    from hpcroll.report import load_decoder, print_trajectory, trajectory_json

    trajectory = Run.open(run_dir).look_up(rollout, attempt=attempt)
    if json:
        print_json(trajectory_json(trajectory, tokens=tokens or raw))
        return
    decode = load_decoder(tokenizer) if tokenizer is not None else None
    print_trajectory(
        trajectory,
        tokens=tokens or tokenizer is not None,
        raw=raw,
        segment=segment,
        call=call,
        decode=decode,
    )


def logs(
    run_dir: RunDirectory,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Last lines of each log.")] = 20,
    rollout: Annotated[str | None, typer.Option("--rollout", help="Events of one rollout instead.")] = None,
    json: Json = False,
) -> None:
    """Show the ends of the workers' logs, or what happened to one rollout."""
    from hpcroll.cli.output import print_rows
    from hpcroll.report import log_tails, rollout_events

    if rollout is not None:
        print_rows(rollout_events(run_dir, rollout), as_json=json, empty=f"no event names rollout {rollout}")
        return
    tails = log_tails(run_dir, lines=lines)
    if json:
        print_rows(tails, as_json=True)
        return
    for tail in tails:
        print(f"==> {tail['log']}\n{tail['text']}")
