"""hpcroll: rollouts for reinforcement learning of LLM agents, on Slurm, without root."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcroll.api import Run as Run
    from hpcroll.shards import open_run as open_run

__version__ = "0.1.0"

__all__ = ["Run", "__version__", "open_run"]

_HOMES = {"Run": "hpcroll.api", "open_run": "hpcroll.shards"}


def __getattr__(name: str) -> Any:
    # Resolved on first use, so that a trainer which only reads never imports the rollout side.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hpcroll' has no attribute {name!r}")
    return getattr(import_module(home), name)
