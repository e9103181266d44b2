"""Picks the configured launcher and starts workers with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcroll.config import RunConfig
from hpcroll.errors import ConfigError, LaunchError
from hpcroll.launch.base import JobHandle, JobState, Launcher
from hpcroll.launch.record import read_launches
from hpcroll.plugins import Family, load


def load_launcher(run_dir: Path, config: RunConfig, *, name: str | None = None) -> Launcher:
    """The launcher `name`, by default the configured one; raises `PluginError` for an unknown name."""
    launcher: Launcher = load(Family.LAUNCHER, name or config.launch.launcher)(run_dir, config)
    return launcher


def start_workers(
    run_dir: Path, config: RunConfig, *, workers: int, leg: str | None = None
) -> Sequence[JobHandle]:
    """Starts `workers` ranks for `leg`, or that many for each leg; recorded in the run on return.

    Raises `ConfigError` for an unknown leg, `LaunchError` and `SubmitError` where nothing can be started.
    """
    launcher = load_launcher(run_dir, config)
    return [handle for name in pick_legs(config, leg) for handle in launcher.start(workers, leg=name)]


def preview_workers(run_dir: Path, config: RunConfig, *, workers: int, leg: str | None = None) -> str:
    """What `start_workers` would submit, for people; submits nothing."""
    launcher = load_launcher(run_dir, config)
    return "\n".join(launcher.preview(workers, leg=name) for name in pick_legs(config, leg))


def pick_legs(config: RunConfig, leg: str | None) -> tuple[str, ...]:
    """`leg` alone, or every leg of the run where it is None; raises `ConfigError` for an unknown one."""
    if leg is None:
        return config.leg_names
    if leg not in config.leg_names:
        raise ConfigError(f"no leg is named {leg!r}; this run's legs: {', '.join(config.leg_names)}")
    return (leg,)


class Ranks:
    """Every rank that was ever launched for a run, whoever launched it."""

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        self._run_dir = run_dir
        self._config = config
        self._launchers: dict[str, Launcher] = {}

    def states(self) -> list[tuple[JobHandle, JobState]]:
        """Each job with its state, oldest launch first, by one query per launcher.

        Keep the object: it holds the launchers' last answers, so that a scheduler is asked seldom.
        """
        by_launcher: dict[str, list[JobHandle]] = {}
        for launch in read_launches(self._run_dir):
            by_launcher.setdefault(launch.record.launcher, []).extend(launch.handles)
        return [
            pair
            for name, handles in by_launcher.items()
            for pair in zip(handles, self._launcher(name).states(handles), strict=True)
        ]

    @property
    def trouble(self) -> str | None:
        """Why the last query for states failed, so that they are old; None where it did not."""
        troubles = (getattr(launcher, "trouble", None) for launcher in self._launchers.values())
        return "; ".join(trouble for trouble in troubles if trouble) or None

    def stop(self) -> list[str]:
        """Has every rank that can be reached from this host drain and end; why others cannot be."""
        troubles = []
        for launch in read_launches(self._run_dir):
            try:
                if launch.handles:
                    self._launcher(launch.record.launcher).stop(launch.handles)
            except LaunchError as error:
                # One launch from a host that is not this one must not keep the others from stopping.
                troubles.append(f"launch {launch.record.launch_id}: {error}")
        return troubles

    def _launcher(self, name: str) -> Launcher:
        if name not in self._launchers:
            self._launchers[name] = load_launcher(self._run_dir, self._config, name=name)
        return self._launchers[name]
