"""Packages that only some exporters need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hpcroll.errors import ConfigError


def need(module: str, exporter: str) -> Any:
    """The module; raises `ConfigError` that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"exporter {exporter} needs the package {module.partition('.')[0]}: "
            "pip install 'hpcroll[exporters]'"
        ) from error
