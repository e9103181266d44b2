"""Commands on sandbox images: pull, build, ls."""

from __future__ import annotations

import typer

group = typer.Typer(help="Sandbox images.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Adds the group to `app`."""
    app.add_typer(group, name="images")
