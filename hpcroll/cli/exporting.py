"""The command `hpcroll shards export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hpcroll.cli.options import Json, RunDirectory
from hpcroll.errors import ConfigError


def register(group: typer.Typer) -> None:
    """Adds the command to the group `shards`."""
    group.command()(export)


def export(
    run_dir: RunDirectory,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="jsonl, parquet, prime-rl, trl ...")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the files go.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run is closed.")] = False,
    trainable: Annotated[bool, typer.Option("--trainable", help="Only trainable rollouts.")] = False,
    groups: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="complete, any or min-usable=K."),
    ] = None,
    max_lag: Annotated[
        int | None, typer.Option(min=0, help="Only rollouts at most so many policy versions behind.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", metavar="KEY=VALUE", help="An option of the format.")
    ] = None,
    part_tokens: Annotated[int, typer.Option(min=1, help="Tokens at which a file is closed.")] = 1 << 20,
    json: Json = False,
) -> None:
    """Write committed trajectories in a format that trainers and other tools read.

    May be killed and called again at any time: each rollout is in exactly one part.
    """
    from dataclasses import asdict

    from hpcroll.cli.output import print_json, progress
    from hpcroll.exporters import ExportFilters, export_run

    rule, min_usable = _group_rule(groups)
    filters = ExportFilters(trainable=trainable, groups=rule, min_usable=min_usable, max_lag=max_lag)
    with progress("exporting"):
        counts = export_run(
            run_dir,
            to,
            out,
            options=_options(option or ()),
            filters=filters,
            follow=follow,
            part_tokens=part_tokens,
        )
    if json:
        print_json(asdict(counts))
    else:
        print(", ".join(f"{name} {value}" for name, value in asdict(counts).items()), f"in {out}")


def _group_rule(text: str | None) -> tuple[str | None, int | None]:
    if text is None or not text.startswith("min-usable"):
        return text, None
    number = text.removeprefix("min-usable").lstrip("= ")
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"--groups {text!r}: write min-usable=K with K 1 or more")
    return None, int(number)


def _options(pairs: list[str] | tuple[()]) -> dict[str, Any]:
    import yaml

    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"option {pair!r} is not of the form key=value")
        options[key] = yaml.safe_load(value)
    return options
