"""Commands on task files: check, from-sdist, from-rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcroll.cli.options import ConfigFile, Json

group = typer.Typer(help="Make and check task files.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Adds the group to `app`."""
    app.add_typer(group, name="tasks")


@group.command()
def check(
    tasks: Annotated[Path, typer.Argument(metavar="TASKS", help="Task file (JSON lines).")],
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Validate a task file as `submit` does, without submitting anything; with --config images, too."""
    from hpcroll.api import check_tasks
    from hpcroll.cli.output import print_rows, progress

    with progress("checking tasks"):
        counts = check_tasks(tasks, config)
    rows = [{"handler": name, "tasks": count} for name, count in sorted(counts.items())]
    print_rows(rows, as_json=json)


@group.command()
def from_sdist(
    package: Annotated[str, typer.Argument(help="Name of a project in the package index.")],
    old: Annotated[str, typer.Argument(help="Version that the agent starts from.")],
    new: Annotated[str, typer.Argument(help="Version whose tests are hidden.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for the task's directory.")] = Path(),
    config: ConfigFile = None,
    image: Annotated[str | None, typer.Option(help="Image of the task; the config's default.")] = None,
    tests: Annotated[list[str] | None, typer.Option(help="Path of the tests, where it is unusual.")] = None,
    library: Annotated[list[str] | None, typer.Option(help="Path of the library, likewise.")] = None,
) -> None:
    """Build a software-engineering task from two releases of a package that ships its tests."""
    from hpcroll.api import build_release_task
    from hpcroll.cli.output import progress

    with progress(f"building {package} {old} -> {new}"):
        path = build_release_task(
            package,
            old,
            new,
            out_dir=out,
            config=config,
            image=image,
            tests=tests or (),
            library=library or (),
        )
    print(path)


@group.command()
def from_rows(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="Rows of a data set (JSON lines).")],
    row_format: Annotated[str, typer.Option("--format", "-f", help="gsm8k, humaneval or scibench.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Task file to write.")],
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="The first so many rows.")] = None,
) -> None:
    """Make a task file from the rows of a known data set."""
    from hpcroll.errors import ConfigError
    from hpcroll.tasks import RowFormat, from_jsonl, write_tasks

    if row_format not in list(RowFormat):
        raise ConfigError(f"no row format is named {row_format!r}; known: {', '.join(RowFormat)}")
    tasks = from_jsonl(rows, RowFormat(row_format))[:limit]
    write_tasks(tasks, out)
    print(f"{out}: {len(tasks)} tasks")
