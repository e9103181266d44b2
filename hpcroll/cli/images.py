"""Commands on sandbox images: pull, build, ls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcroll.cli.options import Json

group = typer.Typer(help="Sandbox images.", no_args_is_help=True)

_Destination = Annotated[Path, typer.Argument(metavar="DEST", help="SIF file to make.")]
_Scratch = Annotated[Path, typer.Option(help="Node-local directory for Apptainer's cache.")]
_Timeout = Annotated[float, typer.Option("--timeout-s", min=1, help="Longest that it may take, in seconds.")]


def register(app: typer.Typer) -> None:
    """Adds the group to `app`."""
    app.add_typer(group, name="images")


@group.command()
def pull(
    uri: Annotated[str, typer.Argument(help="Such as docker://debian:12 or oras://registry/name:tag.")],
    dest: _Destination,
    scratch: _Scratch = Path("/tmp"),
    timeout_s: _Timeout = 3600.0,
) -> None:
    """Pull an image into a SIF file, which appears whole and tried, or not at all."""
    from hpcroll.cli.output import progress
    from hpcroll.sandboxes import image_store

    with progress(f"pulling {uri}"):
        digest = image_store.pull(uri, dest, scratch=scratch, timeout_s=timeout_s)
    print(f"{dest} sha256:{digest}")


@group.command()
def build(
    source: Annotated[str, typer.Argument(help="Definition file, root directory or image.")],
    dest: _Destination,
    option: Annotated[list[str] | None, typer.Option(help="Passed to `apptainer build`.")] = None,
    scratch: _Scratch = Path("/tmp"),
    timeout_s: _Timeout = 3600.0,
) -> None:
    """Build a SIF file from a definition, a directory or an image, without root."""
    from hpcroll.cli.output import progress
    from hpcroll.sandboxes import image_store

    with progress(f"building {dest}"):
        digest = image_store.build(
            source, dest, options=tuple(option or ()), scratch=scratch, timeout_s=timeout_s
        )
    print(f"{dest} sha256:{digest}")


@group.command(name="ls")
def list_images(
    directory: Annotated[Path, typer.Argument(help="Directory with images.")] = Path("images"),
    json: Json = False,
) -> None:
    """List the images in a directory, broken ones with their problem."""
    from hpcroll.cli.output import print_rows
    from hpcroll.sandboxes import images

    rows = [
        {
            "image": str(image.path),
            "kind": image.kind,
            "size_bytes": image.size_bytes,
            "problem": image.problem,
        }
        for image in images.listing(directory)
    ]
    print_rows(rows, as_json=json, empty=f"no images in {directory}")
