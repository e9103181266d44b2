"""From the config to what submitit passes to sbatch."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from hpcroll.config import LaunchConfig
from hpcroll.errors import ConfigError

_OWN = frozenset(
    ("array", "error", "open_mode", "output", "parsable", "signal", "test_only", "time", "wait", "wrap")
)
"""Directives that the launcher itself needs; `time` and `signal` have fields of their own."""
_ARRAY_TASKS = 1_000_000
"""submitit caps array tasks that run at once at 256 unless told otherwise."""


def submitit_parameters(config: LaunchConfig, *, leg: str, job_name: str) -> dict[str, Any]:
    """The keyword arguments of submitit's `update_parameters`.

    Raises `ConfigError` for what `check_launch` refuses.
    """
    further = check_launch(config)
    partition = config.partition.get(leg) if isinstance(config.partition, dict) else config.partition
    parameters: dict[str, Any] = {
        "job_name": job_name,
        "partition": partition,
        "time": config.time_min,
        "cpus_per_task": config.cpus,
        "mem": None if config.memory_mb is None else f"{config.memory_mb}M",
        "signal_delay_s": config.signal_s,
        "array_parallelism": config.array_parallelism or _ARRAY_TASKS,
        "setup": list(config.setup) or None,
        "stderr_to_stdout": True,
        # submitit names one by default, which sites that check wckeys refuse.
        "wckey": None,
    }
    parameters |= {"additional_parameters": {"requeue": True} | further}
    return parameters


def check_launch(config: LaunchConfig) -> dict[str, Any]:
    """The further directives of `config`; raises `ConfigError` for settings that cannot work."""
    if config.signal_s >= 60 * config.time_min:
        raise ConfigError(
            f"launch.signal_s is {config.signal_s} s of a time limit of {60 * config.time_min} s: workers "
            "would be told to drain as soon as they start; raise launch.time_min or lower launch.signal_s"
        )
    ranks_per_job(config)
    return sbatch_directives(config)


def sbatch_directives(config: LaunchConfig) -> dict[str, Any]:
    """`launch.sbatch` as submitit spells it: true is a bare flag, false or null leaves it out.

    Raises `ConfigError` for a directive that the launcher itself sets.
    """
    directives: dict[str, Any] = {}
    for name, value in config.sbatch.items():
        # submitit's own parameters have underscores; another spelling would give a second line.
        key = name.removeprefix("--").replace("-", "_")
        if key in _OWN:
            raise ConfigError(f"launch.sbatch.{name} is set by the launcher; see the fields of launch")
        if isinstance(value, dict | list):
            raise ConfigError(f"launch.sbatch.{name} must be one value, not {type(value).__name__}")
        if value is not None and value is not False:
            directives[key] = value
    return directives


def ranks_per_job(config: LaunchConfig) -> int:
    """How many ranks one job holds: 1 unless sbatch directives ask for more."""
    directives = sbatch_directives(config)
    if "ntasks" in directives:
        return _count(directives["ntasks"], "ntasks")
    nodes = _count(directives.get("nodes", 1), "nodes")
    return nodes * _count(directives.get("ntasks_per_node", 1), "ntasks-per-node")


def worker_python(config: LaunchConfig) -> str:
    """The shell-quoted command that is the workers' Python."""
    return shlex.quote(sys.executable) if config.python is None else config.python


def _count(value: Any, name: str) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise ConfigError(f"launch.sbatch.{name} must be a whole number of at least 1, not {value!r}")
    return count
