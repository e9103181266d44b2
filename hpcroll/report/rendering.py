"""`RunStatus` for people: at a glance, or refreshed until all is done."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcroll.contract import Status
from hpcroll.policy import Allowance
from hpcroll.report.status import RunStatus

_STYLES = {
    Status.COMPLETED: "green",
    Status.TRUNCATED: "yellow",
    Status.FAILED: "red",
    Status.CANCELLED: "dim",
}


def print_status(status: RunStatus) -> None:
    """Prints the status once."""
    Console().print(render_status(status))


def watch_status(observe: Callable[[], RunStatus], *, every_s: float) -> RunStatus:
    """Shows the status until every rollout is committed or the run is closed; the last one."""
    status = observe()
    console = Console()
    if not console.is_terminal:
        # Into a file or a pipe: one line per change, no cursor movements.
        return _watch_lines(observe, status, every_s)
    with Live(render_status(status), console=console, auto_refresh=False) as live:
        while not (status.done or status.closed):
            time.sleep(every_s)
            status = observe()
            live.update(render_status(status), refresh=True)
    return status


def _watch_lines(observe: Callable[[], RunStatus], status: RunStatus, every_s: float) -> RunStatus:
    shown = ""
    while True:
        line = status_line(status)
        if line != shown:
            print(line, flush=True)
            shown = line
        if status.done or status.closed:
            return status
        time.sleep(every_s)
        status = observe()


def status_line(status: RunStatus) -> str:
    """The status in one line of plain text."""
    stages = " ".join(f"{stage}={count}" for stage, count in status.stages.items())
    failures = " ".join(f"{item.failure_class}={item.count}" for item in status.failures)
    return (
        f"committed {status.committed}/{status.total}  {stages}  workers={status.workers_alive}"
        f"  rate={_rate(status.rate_per_min)}  left={_duration(status.left_s)}"
        + (f"  failed attempts: {failures}" if failures else "")
    )


def render_status(status: RunStatus) -> RenderableType:
    """The status as a rich renderable."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold")
    rows.add_column()
    rows.add_row("", ProgressBar(total=max(1, status.total), completed=status.committed, width=50))
    for name, value in _rows(status):
        rows.add_row(name, value)
    return Group(Text(f"run {status.run_dir}{_wishes(status)}", style="bold"), rows)


def _rows(status: RunStatus) -> list[tuple[str, RenderableType]]:
    committed = Text(f"{status.committed} of {status.total}  ")
    for name, count in status.statuses.items():
        committed.append(f" {name} {count}", style=_STYLES[name])
    rows: list[tuple[str, RenderableType]] = [
        ("committed", committed),
        ("in stage", Text("  ".join(f"{stage} {count}" for stage, count in status.stages.items()))),
        ("rate", Text(f"{_rate(status.rate_per_min)}, {_duration(status.left_s)} left")),
        ("workers", Text(_workers(status))),
    ]
    if status.jobs:
        rows.append(("jobs", Text("  ".join(f"{state} {count}" for state, count in status.jobs.items()))))
    if status.job_trouble:
        rows.append(("", Text(f"the scheduler was not asked: {status.job_trouble}", style="yellow")))
    rows += [
        ("servers", Text(", ".join(status.endpoints) or "none registered")),
        ("shards", Text(f"{status.shards} files, {status.shard_bytes / 1e6:.1f} MB")),
        (
            "policy",
            Text(_policy(status)),
        ),
    ]
    if status.window is not None:
        rows.append(("window", Text(_window(status.window, status.waiting_groups))))
    rows += [
        ("failed attempts", Text(f"{item.failure_class} {item.count}: {item.text}", style="red"))
        for item in status.failures
    ]
    if status.exact is not None:
        for leg, done in status.exact.done.items():
            running, attempts = status.exact.running[leg], status.exact.attempts[leg]
            rows.append((f"leg {leg}", Text(f"done {done}  running {running}  attempts {attempts}")))
    return rows


def _workers(status: RunStatus) -> str:
    text = f"{status.workers_alive} alive, {status.workers_silent} silent, {status.workers_ended} ended"
    return (
        text if status.beat_age_s is None else f"{text}; latest heartbeat {_duration(status.beat_age_s)} ago"
    )


def _wishes(status: RunStatus) -> str:
    wishes = [name for name, made in (("closed", status.closed), ("draining", status.draining)) if made]
    return f" ({', '.join(wishes)})" if wishes else ""


def _rate(rate_per_min: float | None) -> str:
    return "no rate yet" if rate_per_min is None else f"{rate_per_min:.3g}/min"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _policy(status: RunStatus) -> str:
    version = "none published" if status.policy_version is None else f"version {status.policy_version}"
    return f"{version}, paused by {', '.join(status.paused_by)}" if status.paused_by else version


def _window(window: Allowance, waiting_groups: int) -> str:
    text = f"groups below {window.limit} may start, {window.settled} are settled"
    return f"{text}; {waiting_groups} wait behind it" if waiting_groups else text
