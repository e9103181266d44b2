"""The window: how many groups rollouts may be ahead of the trainer.

It is one state of the run, `policy/window/now`, see `state_chain`: bounds, and the number of groups that the
trainer has settled. A group's position is its index in submission order. Whatever a worker reads late makes
it wait longer, since that number and the newest version only grow.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field, ValidationError

from hpcroll.contract import Frozen
from hpcroll.contract.policy import PolicyVersion
from hpcroll.errors import ConfigError, SpoolError
from hpcroll.fs import RunPaths
from hpcroll.policy.state_chain import ChainState, StateChain
from hpcroll.policy.versions import read_latest

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How old a worker's view of the window may be, in seconds."""


class Bounds(Frozen):
    """How far rollouts may be ahead; a bound that is None lets everything pass."""

    groups: int | None = Field(default=None, ge=1)
    """Groups that may be started and not settled."""
    versions: int | None = Field(default=None, ge=0)
    """Versions by which what is sampled now may be older than those that train on it."""
    groups_per_version: int | None = Field(default=None, ge=1)
    """Groups that the trainer trains on for each version that it publishes."""


class WindowState(ChainState):
    """The window after the `generation`-th change."""

    SCHEMA: ClassVar[str] = "1.0"

    bounds: Bounds | None = None
    """None: there is no window."""
    settled: int = Field(default=0, ge=0)
    """Groups that the trainer is through with, whatever became of them."""
    dropped: int = Field(default=0, ge=0)
    """How many of those it did not train on."""
    more: bool = False
    """Further groups will be submitted: a worker that finds none is not through."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Which groups may be started: those at positions below `limit`, all of them where it is None."""

    bounds: Bounds | None
    settled: int
    dropped: int
    by_groups: int | None = None
    """The limit that `groups` sets."""
    by_versions: int | None = None
    """The limit that `versions` sets."""

    @property
    def limit(self) -> int | None:
        return min((by for by in (self.by_groups, self.by_versions) if by is not None), default=None)


def allowance(state: WindowState, latest: PolicyVersion | None) -> Allowance:
    """What `state` allows while `latest` is the newest version, None where nothing was published."""
    bounds = state.bounds
    if bounds is None:
        return Allowance(None, state.settled, state.dropped)
    by_groups = None if bounds.groups is None else state.settled + bounds.groups
    by_versions = None
    if bounds.versions is not None and bounds.groups_per_version is not None:
        published, settled, dropped = 0, 0, 0
        if latest is not None:
            base = latest.base
            published, settled, dropped = latest.version - base.version, base.settled, base.dropped
        by_versions = settled + (published + bounds.versions + 1) * bounds.groups_per_version
        # Groups that were not trained on take no place in a version.
        by_versions += state.dropped - dropped
    return Allowance(bounds, state.settled, state.dropped, by_groups, by_versions)


class Window:
    """The window of one run, as trainers and operators change it. For one thread."""

    def __init__(self, paths: RunPaths) -> None:
        self._chain = window_chain(paths)

    def read(self) -> WindowState:
        """The state in force."""
        return self._chain.read()

    def set(self, *, groups: int | None, versions: int | None, groups_per_version: int | None) -> WindowState:
        """Sets the bounds; raises `ConfigError` for bounds that bound nothing."""
        if (versions is None) != (groups_per_version is None):
            raise ConfigError("a window in versions needs both versions and groups_per_version")
        if groups is None and versions is None:
            raise ConfigError("a window needs groups, or versions with groups_per_version; none is given")
        try:
            bounds = Bounds(groups=groups, versions=versions, groups_per_version=groups_per_version)
        except ValidationError as error:
            raise ConfigError(f"this window cannot be set: {error}") from error
        return self._chain.change(lambda state: state.model_copy(update={"bounds": bounds}))

    def lift(self) -> bool:
        """Takes the bounds away; whether there were any. What is settled stays."""
        had = False

        def remove(state: WindowState) -> WindowState:
            nonlocal had
            had = state.bounds is not None
            return state.model_copy(update={"bounds": None})

        self._chain.change(remove)
        return had

    def settle(self, settled: int, *, dropped: int | None) -> WindowState:
        """Raises the numbers of settled and dropped groups; lower ones change nothing."""
        if settled < 0 or not 0 <= (dropped or 0) <= settled:
            raise ConfigError(
                f"settled={settled}, dropped={dropped}: both count groups since the run began, and those "
                "that were dropped are among those that are settled"
            )

        def raise_to(state: WindowState) -> WindowState:
            return state.model_copy(
                update={
                    "settled": max(state.settled, settled),
                    "dropped": max(state.dropped, dropped or 0),
                }
            )

        return self._chain.change(raise_to)

    def expect(self, *, more: bool) -> None:
        """Says whether further groups will be submitted."""
        self._chain.change(lambda state: state.model_copy(update={"more": more}))


class WindowWatch:
    """What a worker may start, about `LOOK_S` old. For one thread."""

    def __init__(
        self, paths: RunPaths, policy_name: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._chain = window_chain(paths)
        self._paths = paths
        self._policy_name = policy_name
        self._clock = clock
        self._seen: Allowance | None = None
        self._looked_at_s = 0.0
        self._more = False

    def limit(self) -> int | None:
        """Groups at positions below it may be started; None: all.

        Raises `OSError` or `SpoolError` where the window could not be read yet; once it was, what is known
        stands while the file system is in trouble.
        """
        now_s = self._clock()
        if self._seen is None:
            self._chain.prepare()
            self._seen = self._look()
        elif now_s - self._looked_at_s >= LOOK_S:
            try:
                self._seen = self._look()
            except OSError as error:
                log.warning("window=unread: %s", error)
        else:
            return self._seen.limit
        self._looked_at_s = now_s
        return self._seen.limit

    def expects_more(self) -> bool:
        """Whether further groups will be submitted; also where that cannot be read."""
        try:
            self.limit()
        except (OSError, SpoolError) as error:
            log.warning("window=unread: %s", error)
            return True
        return self._more

    def _look(self) -> Allowance:
        state = self._chain.read_existing()
        self._more = state.more
        bounds = state.bounds
        latest = None
        if bounds is not None and bounds.versions is not None:
            latest = read_latest(self._paths, self._policy_name)
        return allowance(state, latest)


def window_chain(paths: RunPaths) -> StateChain[WindowState]:
    """The chain of a run's window."""
    return StateChain(
        WindowState(), now=paths.window_now, change=paths.window_change, what="a state of the window"
    )
