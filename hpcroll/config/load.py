"""Reads a run's YAML config."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hpcroll.config.models import RunConfig
from hpcroll.errors import ConfigError


def load_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The config in YAML file `path`, with `overrides` such as `stages.run.width=2` applied.

    Raises `ConfigError`, which names the file and each wrong key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config {path} is not UTF-8 text: {error}") from error
    return parse_config(text, source=str(path), overrides=overrides)


def parse_config(text: str, *, source: str, overrides: Iterable[str] = ()) -> RunConfig:
    """The config in YAML `text`; `source` names it in errors (`ConfigError`)."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"config {source} is not YAML: {error}") from error
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise ConfigError(f"config {source} must be a mapping, not {type(data).__name__}")
    for override in overrides:
        _apply(data, override)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"config {source}: {describe(error)}") from error


def describe(error: ValidationError) -> str:
    """One line per wrong field of `error`: where, what, and what was given."""
    lines = []
    for item in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in item["loc"]) or "(top)"
        message = "unknown key" if item["type"] == "extra_forbidden" else item["msg"]
        lines.append(f"{where}: {message} (got {item['input']!r:.80})")
    return "; ".join(lines)


def _apply(data: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    if not equals or not path:
        raise ConfigError(f"override {override!r} is not of the form key.key=value")
    *parents, leaf = path.split(".")
    node = data
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {name} is not a mapping")
    node[leaf] = yaml.safe_load(value)
