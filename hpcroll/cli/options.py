"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _is_run(path: Path) -> Path:
    if not (path / "run.json").is_file():
        raise typer.BadParameter(f"{path} holds no run (no run.json); `hpcroll submit --config` makes one")
    return path


RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", callback=_is_run)]
NewRunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="YAML", help="Config of a run."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value of --config (stages.run.width=2)."),
]
Leg = Annotated[str | None, typer.Option("--leg", help="One leg, for example eval; all where absent.")]
Key = Annotated[str | None, typer.Option("--key", help="Submission key.")]
