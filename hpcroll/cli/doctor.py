"""The command `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcroll.cli.options import ConfigFile, Json


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command()(doctor)


def doctor(
    run_dir: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Run, or where one is to be.")
    ] = None,
    config: ConfigFile = None,
    endpoint: Annotated[str | None, typer.Option(metavar="URL", help="Inference server to check.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name that --endpoint serves.")] = None,
    json: Json = False,
) -> int:
    """Check this host, and an inference server: what works, what does not, and what to do."""
    from hpcroll.api import read_config
    from hpcroll.cli.output import print_json
    from hpcroll.report import examine, print_findings

    resolved = None if config is None else read_config(config)
    findings = examine(run_dir, config=resolved, endpoint=endpoint, model=model)
    if json:
        print_json([finding.to_dict() for finding in findings])
    else:
        print_findings(findings)
    return 1 if any(finding.is_error for finding in findings) else 0
