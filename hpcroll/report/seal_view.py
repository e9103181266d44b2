"""What sealing did, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NAMED = 3
"""Rollouts that are named for each thing they wait for."""


def seal_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a seal report, given as JSON values."""
    for incarnation, why in report["ended"].items():
        yield f"recorded the end of {incarnation}: {why}"
    for incarnation, why in report["unsure"].items():
        yield f"left alone: {incarnation}: {why}; `--gone {incarnation}` says that it is dead"
    yield (
        f"sealed: {len(report['ended'])} ends recorded, {report['indexed']} records indexed, "
        f"{report['carried']} carried to later legs, {report['cancelled']} committed as cancelled; "
        f"{len(report['alive'])} workers live"
    )
    open_ones = report["unfinished"]
    for waiting, count in open_ones["waiting"].items():
        names = [item["rollout"] for item in open_ones["examples"] if item["waiting"] == waiting]
        more = ", ..." if count > len(names[:_NAMED]) else ""
        yield f"{count} without a result: {waiting} ({', '.join(names[:_NAMED])}{more})"
    yield _conclusion(report)


def _conclusion(report: Mapping[str, Any]) -> str:
    done = (
        f"{report['total'] - report['unfinished']['count']} of {report['total']} rollouts have their result"
    )
    if report["closed"]:
        return f"{done}; the run is closed, and its followers end"
    if report["complete"]:
        return f"{done}; followers wait for more until `hpcroll close`"
    return f"{done}; `hpcroll launch` goes on with the rest"
