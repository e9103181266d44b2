"""From what a user gives to a resolved config; nothing is written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcroll.config import RunConfig, load_config
from hpcroll.config.load import describe
from hpcroll.errors import ConfigError


def read_config(
    config: Path | str | RunConfig | dict[str, Any] | None, overrides: Iterable[str] = ()
) -> RunConfig:
    """The config, its relative paths anchored at the YAML file or the working directory."""
    if isinstance(config, Path | str):
        path = Path(config)
        return anchor_paths(load_config(path, overrides), path.absolute().parent)
    if tuple(overrides):
        raise ConfigError("overrides apply to a config file only")
    if isinstance(config, RunConfig):
        return anchor_paths(config, Path.cwd())
    try:
        return anchor_paths(RunConfig.model_validate(config or {}), Path.cwd())
    except ValidationError as error:
        raise ConfigError(f"config: {describe(error)}") from error


def anchor_paths(config: RunConfig, base: Path) -> RunConfig:
    """The config with relative image, bind and dictionary paths made absolute, as seen from `base`.

    Workers start in other directories, on other nodes.
    """
    sandbox = config.sandbox
    binds = tuple(_anchor_bind(bind, base) for bind in sandbox.binds)
    changed = sandbox.model_copy(update={"image": anchor_image(sandbox.image, base), "binds": binds})
    shards = config.shards
    if shards.dictionary not in ("auto", "off"):
        shards = shards.model_copy(update={"dictionary": str((base / shards.dictionary).absolute())})
    return config.model_copy(update={"sandbox": changed, "shards": shards})


def anchor_image(image: str | None, base: Path) -> str | None:
    """`image` as an absolute path where it is a relative one; names such as `host` stay."""
    is_path = image is not None and ("/" in image or image.endswith(".sif")) and "://" not in image
    return str((base / image).absolute()) if image is not None and is_path else image


def _anchor_bind(bind: str, base: Path) -> str:
    source, colon, target = bind.partition(":")
    return f"{(base / source).absolute()}{colon}{target}"
