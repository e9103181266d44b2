"""Commands on agent programs: install, list, check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcroll.cli.options import Json

group = typer.Typer(help="Agent programs that run as black boxes.", no_args_is_help=True)

_Name = Annotated[str, typer.Argument(metavar="NAME", help="Harness of the agent; `list` shows them.")]
_Store = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Directory that every node sees; your own data directory if absent."),
]
_Version = Annotated[
    str | None, typer.Option("--agent-version", help="Another version than the one that was tried.")
]


def register(app: typer.Typer) -> None:
    """Adds the group to `app`."""
    app.add_typer(group, name="agents")


@group.command()
def install(
    name: _Name,
    store: _Store = None,
    agent_version: _Version = None,
    python: Annotated[
        str | None, typer.Option(help="Python that an agent from PyPI gets a copy of; this one if absent.")
    ] = None,
    scratch: Annotated[
        Path | None, typer.Option(help="Node-local directory to build in, a gigabyte or two.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Build it anew where it is installed.")] = False,
) -> None:
    """Fetch an agent at its pinned version from npm or PyPI, into one file of the store."""
    from hpcroll.cli.output import progress
    from hpcroll.errors import ConfigError
    from hpcroll.harnesses.trees import build, catalogue
    from hpcroll.harnesses.trees import store as stores

    program = catalogue.program(name)
    directory = (store or stores.default_store()).absolute()
    try:
        archive = None if force else stores.find(directory, name, agent_version or program.version)
    except ConfigError:
        archive = None
    if archive is None:
        with progress(f"installing {name}"):
            archive = build.install(program, directory, version=agent_version, python=python, scratch=scratch)
    print(archive.path)


@group.command(name="list")
def list_agents(store: _Store = None, json: Json = False) -> None:
    """List the agents that can be installed, and those that are."""
    from hpcroll.cli.output import print_rows
    from hpcroll.harnesses.trees import catalogue
    from hpcroll.harnesses.trees import store as stores

    directory = (store or stores.default_store()).absolute()
    installed = stores.listing(directory)
    rows = []
    for name, program in catalogue.programs().items():
        found = [archive for archive in installed if archive.name == program.name]
        rows.append(
            {
                "agent": name,
                "version": program.version,
                "dialect": str(program.dialect),
                "installed": ", ".join(sorted({archive.version for archive in found})) or None,
                "size_bytes": sum(archive.path.stat().st_size for archive in found) or None,
            }
        )
    print_rows(rows, as_json=json)


@group.command()
def check(
    name: _Name,
    store: _Store = None,
    agent_version: _Version = None,
    sandbox: Annotated[str, typer.Option(help="Sandbox to start it in.")] = "bwrap",
    image: Annotated[str | None, typer.Option(help="Image to start it in.")] = None,
    scratch: Annotated[Path, typer.Option(help="Node-local directory for its tree.")] = Path("/tmp"),
) -> None:
    """Start an installed agent in a sandbox of this node, and print the version that it says it is."""
    from hpcroll.api.configuring import anchor_image
    from hpcroll.config import SandboxConfig
    from hpcroll.harnesses.trees import catalogue

    catalogue.program(name)
    config = SandboxConfig(name=sandbox, image=anchor_image(image, Path.cwd()), scratch=scratch)
    directory = None if store is None else store.absolute()
    print(catalogue.check(name, config, store=directory, version=agent_version))
