"""Looks plug-ins up among the installed entry points, or by dotted path."""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from hpcroll.errors import PluginError


class Family(StrEnum):
    """The extension points; the value is the entry-point group."""

    LAUNCHER = "hpcroll.launchers"
    SANDBOX = "hpcroll.sandboxes"
    HARNESS = "hpcroll.harnesses"
    HANDLER = "hpcroll.handlers"
    EVALUATOR = "hpcroll.evaluators"
    DIALECT = "hpcroll.dialects"
    EXPORTER = "hpcroll.exporters"


def known(family: Family) -> dict[str, EntryPoint]:
    """The installed plug-ins of `family` by name, sorted."""
    return {point.name: point for point in sorted(entry_points(group=family.value))}


def load(family: Family, name: str) -> Any:
    """The class behind `name`: an entry point's name, or `package.module:Attribute`.

    Raises `PluginError`, which lists the known names, where there is none or where it does not import.
    """
    points = known(family)
    point = points.get(name)
    if point is None and ":" not in name:
        raise PluginError(
            f"no {family.name.lower()} is named {name!r}; known: {', '.join(points) or 'none'} "
            "(or give a dotted path, package.module:Class)"
        )
    try:
        return point.load() if point is not None else _from_path(name)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"{family.name.lower()} {name!r} does not load: {error}; known: {', '.join(points)}"
        ) from error


def _from_path(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
