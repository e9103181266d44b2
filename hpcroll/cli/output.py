"""Printing: tables for people, JSON for programs, progress on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

_UNBOUNDED_COLUMNS = 10_000


def print_json(value: Any) -> None:
    """Prints `value` as one JSON document; non-ASCII text and NaN never break a consumer."""
    print(json.dumps(value, indent=2, default=str, allow_nan=False))


def print_rows(rows: Sequence[Mapping[str, Any]], *, as_json: bool, empty: str = "nothing") -> None:
    """Prints a listing: a table whose columns are the keys of the first row, or JSON."""
    if as_json:
        print_json(list(rows))
        return
    if not rows:
        print(empty)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right" if _is_number(rows[0][name]) else "left")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console = Console()
    if not console.is_terminal:
        # Nobody's window bounds a file or a pipe: paths must come out whole.
        console.width = _UNBOUNDED_COLUMNS
    console.print(table, markup=False)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@contextmanager
def progress(description: str) -> Iterator[Progress]:
    """A progress display on standard error, silent where that is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as display:
        display.add_task(description, total=None)
        yield display


def say(text: str) -> None:
    """One line for people on standard error."""
    print(text, file=sys.stderr, flush=True)
