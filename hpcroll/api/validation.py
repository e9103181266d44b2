"""Everything that can be told wrong before anything is written."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from hpcroll.config import ModelMode, RunConfig
from hpcroll.config.load import describe
from hpcroll.contract import Task
from hpcroll.errors import ConfigError, SandboxError
from hpcroll.launch.sbatch import check_launch
from hpcroll.plugins import Family, load
from hpcroll.sandboxes.base import SandboxProvider
from hpcroll.shards import check_dictionary

log = logging.getLogger(__name__)


def check_config(config: RunConfig) -> SandboxProvider:
    """Loads every plug-in that `config` names and validates its options; the sandbox provider.

    Raises `PluginError` for an unknown name and `ConfigError` for wrong options.
    """
    provider: SandboxProvider = _plugin(Family.SANDBOX, config.sandbox.name, config.sandbox.options)(
        config.sandbox
    )
    _plugin(Family.HARNESS, config.harness.name, config.harness.options)
    load(Family.LAUNCHER, config.launch.launcher)
    check_launch(config.launch)
    check_dictionary(config.shards.dictionary)
    if isinstance(config.launch.partition, dict):
        unknown = sorted(set(config.launch.partition) - set(config.leg_names))
        if unknown:
            raise ConfigError(
                f"launch.partition names {', '.join(unknown)}, which is no leg of this config; "
                f"its legs: {', '.join(config.leg_names)}"
            )
    return provider


def check_model(config: RunConfig) -> None:
    """Raises `ConfigError` where mode `tokens` cannot render: no tokenizer, no such renderer, no extra."""
    if config.model.mode is ModelMode.TOKENS:
        # Imported where it is used: who opens a run to read or watch it needs no gateway.
        from hpcroll.gateway.tokens import load_renderer

        load_renderer(config.model)


def check_agent(config: RunConfig) -> None:
    """Raises `ConfigError` where the harness's agent program is not installed."""
    # Imported where it is used: who opens a run to read or watch it needs no gateway.
    from hpcroll.harnesses.base import Installed

    harness = load(Family.HARNESS, config.harness.name)(config.harness)
    if isinstance(harness, Installed):
        harness.check()


def check_images(provider: SandboxProvider, tasks: Iterable[Task]) -> None:
    """Checks each image once; raises `ImageError` or `ConfigError`, which name it."""
    for image in dict.fromkeys(task.image for task in tasks):
        provider.check(image)


def warn_of_missing_capabilities(provider: SandboxProvider) -> None:
    """Logs what this host's sandboxes lack: only a warning, since the workers' nodes may differ."""
    try:
        able = provider.probe()
    except SandboxError as error:
        log.warning("sandboxes cannot be probed on this host: %s", error)
        return
    if not able.available:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in able.reasons.items())
        log.warning("sandboxes do not work on this host (%s); workers refuse nodes like it", reasons)


def _plugin(family: Family, name: str, options: dict[str, Any]) -> Any:
    found = load(family, name)
    try:
        found.Options.model_validate(options)
    except ValidationError as error:
        raise ConfigError(f"options of {family.name.lower()} {name!r}: {describe(error)}") from error
    return found
