"""Examines this host: Python, file system, sandboxes, Slurm and, where asked, an inference server."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from hpcroll.config import RunConfig
from hpcroll.errors import HpcrollError, LaunchError
from hpcroll.fs import filesystem_type, is_node_local, probe_filesystem
from hpcroll.launch.scheduler import SlurmFacts, slurm_facts
from hpcroll.plugins import Family, known, load
from hpcroll.report.finding import Finding, Level
from hpcroll.sandboxes.base import Capabilities
from hpcroll.spool import Spool

_SHORTEST_KILL_WAIT_S = 5


def examine(
    run_dir: Path | None,
    *,
    config: RunConfig | None = None,
    endpoint: str | None = None,
    model: str | None = None,
) -> list[Finding]:
    """Everything found; with `endpoint`, of that server alone.

    `run_dir` is a run, whose config is used where none is given, or a directory in which one is to be made.
    """
    settings = _config(run_dir, config)
    if endpoint is not None:
        # Imported where it is used: it brings the gateway, which `status` can do without.
        from hpcroll.report.endpoint_check import check_endpoint

        return list(check_endpoint(endpoint, model or settings.model.served_name or settings.model.name))
    return [
        Finding("python", Level.OK, f"{platform.python_version()}, hpcroll {version('hpcroll')}"),
        *_filesystem(run_dir or Path.cwd()),
        *_scratch(settings.sandbox.scratch),
        *_sandboxes(settings),
        *_slurm(wanted=settings.launch.launcher == "slurm"),
    ]


def _config(run_dir: Path | None, config: RunConfig | None) -> RunConfig:
    if config is not None:
        return config
    if run_dir is not None and (run_dir / "run.json").exists():
        return Spool.open(run_dir).config
    return RunConfig()


def _filesystem(directory: Path) -> Iterator[Finding]:
    place = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    try:
        probe = probe_filesystem(place)
    except (HpcrollError, OSError) as error:
        yield Finding("file system", Level.ERROR, str(error))
        return
    text = (
        f"{place} is on {probe.filesystem}: links work, a durable write takes {1000 * probe.fsync_s:.1f} ms, "
        f"{probe.free_bytes / 1e9:.1f} GB free"
    )
    yield Finding("file system", Level.OK, text)
    if is_node_local(probe.filesystem) and shutil.which("sinfo") is not None:
        yield Finding(
            "file system",
            Level.WARNING,
            f"{probe.filesystem} is local to this node",
            "a run that several nodes work on has to lie on a file system that all of them mount",
        )


def _scratch(scratch: Path) -> Iterator[Finding]:
    if not scratch.is_dir():
        yield Finding("scratch", Level.ERROR, f"{scratch} does not exist", "set sandbox.scratch")
    elif not is_node_local(filesystem_type(scratch)):
        yield Finding(
            "scratch", Level.WARNING, f"{scratch} is on a shared file system", "set sandbox.scratch"
        )
    else:
        free_gb = shutil.disk_usage(scratch).free / 1e9
        yield Finding("scratch", Level.OK, f"{scratch} is node-local, {free_gb:.1f} GB free")


def _sandboxes(config: RunConfig) -> Iterator[Finding]:
    for name in known(Family.SANDBOX):
        chosen = name == config.sandbox.name
        area = f"sandbox {name}" + (" (configured)" if chosen else "")
        settings = (
            config.sandbox if chosen else config.sandbox.model_copy(update={"name": name, "options": {}})
        )
        try:
            able: Capabilities = load(Family.SANDBOX, name)(settings).probe()
        except (HpcrollError, OSError) as error:
            yield Finding(area, Level.ERROR if chosen else Level.WARNING, str(error))
            continue
        yield _capabilities(area, able, chosen=chosen)


def _capabilities(area: str, able: Capabilities, *, chosen: bool) -> Finding:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in able.reasons.items())
    if not able.available:
        level = Level.ERROR if chosen else Level.WARNING
        return Finding(area, level, f"not available ({reasons})", "choose another, or see docs/reference")
    abilities = {
        "network isolation": able.network_isolation,
        "pid isolation": able.pid_isolation,
        "model socket": able.model_socket,
        "memory limit": able.memory_limit,
        "disk limit": able.disk_limit,
        "fakeroot": able.fakeroot,
    }
    has = ", ".join(name for name, there in abilities.items() if there) or "nothing"
    lacks = ", ".join(name for name, there in abilities.items() if not there) or "nothing"
    text = f"{able.version}; root writable by {able.writable_root}; has {has}; lacks {lacks}"
    isolated = able.network_isolation and able.pid_isolation
    return Finding(area, Level.OK if isolated else Level.WARNING, text, reasons)


def _slurm(*, wanted: bool) -> Iterator[Finding]:
    if shutil.which("sbatch") is None:
        level = Level.ERROR if wanted else Level.OK
        yield Finding("slurm", level, "no sbatch on PATH", "submit from a login node" if wanted else "")
        return
    try:
        facts = slurm_facts()
    except LaunchError as error:
        yield Finding("slurm", Level.ERROR if wanted else Level.WARNING, str(error))
        return
    yield Finding(
        "slurm",
        Level.OK,
        f"{facts.version}, partitions {', '.join(facts.partitions)}, arrays of up to {facts.max_array_size}, "
        f"preemption {facts.preempt_mode}",
    )
    yield from _slurm_traps(facts)


def _slurm_traps(facts: SlurmFacts) -> Iterator[Finding]:
    if not facts.accounting:
        yield Finding(
            "slurm",
            Level.WARNING,
            "no accounting: a job that the controller forgot counts as failed",
            "job states come from squeue alone here",
        )
    if facts.kill_wait_s < _SHORTEST_KILL_WAIT_S:
        yield Finding(
            "slurm",
            Level.WARNING,
            f"KillWait is {facts.kill_wait_s} s: `scancel` kills workers before they release their rollouts",
            "end workers with `hpcroll drain`",
        )
    if "CANCEL" in facts.preempt_mode.upper():
        yield Finding(
            "slurm",
            Level.WARNING,
            "preempted jobs are cancelled here, not requeued",
            "workers release their rollouts, but `hpcroll launch` has to start others",
        )
