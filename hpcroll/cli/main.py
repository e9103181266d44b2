"""The command `hpcroll`.

Exit status: 0 done, 1 the work failed, 2 bad usage or bad input. Errors are one line on standard error;
`--debug` adds the traceback. Only what a command needs is imported, when it runs: that keeps the start
below half a second.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer
from typer.exceptions import Abort, TyperException

import hpcroll
from hpcroll.cli import agents, demo, doctor, images, policies, runs, shards, tasks, watching, workers
from hpcroll.errors import ConfigError, HpcrollError, ImageError, PluginError, UnsafeFilesystemError

app = typer.Typer(
    name="hpcroll",
    help="Rollouts for reinforcement learning of LLM agents, on Slurm, without root.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_BAD_INPUT = (ConfigError, PluginError, ImageError, UnsafeFilesystemError)
"""Errors that somebody has to change a file or an argument for."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hpcroll {hpcroll.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


demo.register(app)
tasks.register(app)
images.register(app)
agents.register(app)
runs.register(app)
workers.register(app)
policies.register(app)
watching.register(app)
shards.register(app)
doctor.register(app)


def run(argv: Sequence[str]) -> int:
    """Runs one command line and returns its exit status; nothing but `SystemExit` of a signal escapes."""
    try:
        status = app(list(argv), standalone_mode=False, prog_name="hpcroll")
    except TyperException as error:
        print(f"hpcroll: {error.format_message()}", file=sys.stderr)
        return error.exit_code
    except (Abort, KeyboardInterrupt):
        print("hpcroll: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has seen enough; flushing at exit must not fail again.
        sys.stdout = None
        return 0
    except Exception as error:  # noqa: BLE001 - the last of the three places that catch: no traceback
        return _report(error, debug="--debug" in argv)
    return status if isinstance(status, int) else 0


def _report(error: Exception, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    expected = isinstance(error, HpcrollError)
    text = " ".join(str(error).split()) or type(error).__name__
    if expected or isinstance(error, OSError):
        print(f"hpcroll: {text}", file=sys.stderr)
    else:
        print(
            f"hpcroll: internal error: {type(error).__name__}: {text} (--debug shows where)", file=sys.stderr
        )
    return 2 if isinstance(error, _BAD_INPUT) else 1


def main() -> NoReturn:
    """Entry point of the `hpcroll` command."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
