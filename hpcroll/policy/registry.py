"""The policy registry: what a trainer and an operator say and ask, in one place."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import ValidationError

from hpcroll.contract.policy import Branch, PolicyVersion
from hpcroll.errors import ConfigError
from hpcroll.fs.paths import RunPaths
from hpcroll.policy.endpoints import DEFAULT_KIND, Endpoint, EndpointLease, EndpointWatch, register
from hpcroll.policy.gates import GateWatch
from hpcroll.policy.ledger import PoolLine, read_pools
from hpcroll.policy.lineages import Lineage, base_of, lineages, parent_of
from hpcroll.policy.pauses import Pause, PauseMode, Pauses
from hpcroll.policy.versions import VersionChain
from hpcroll.policy.window import Allowance, Window, WindowState, allowance

log = logging.getLogger(__name__)

TRAINER = "trainer"
"""Whose pause it is where nobody says."""
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.1, 1.0
"""Seconds between two looks at the gates, growing: each is a listing, and a read per worker waited for."""
_SEEN_S = 15.0
"""Seconds that gateways get to see a pause, on top of what calls in flight get."""


@dataclass(frozen=True, slots=True)
class PauseOutcome:
    """How far a pause has come."""

    pause: Pause
    waiting: dict[str, str]
    """Live workers (incarnations) that have yet to act on it, with what is missing."""

    @property
    def complete(self) -> bool:
        """Every live worker admits no new call and, unless calls are kept, has none in flight."""
        return not self.waiting


class PolicyRegistry:
    """The policy versions, inference servers, pauses and the window of one run. For one thread.

    `name`: the policy that is meant where a call names none.
    """

    def __init__(self, paths: RunPaths, *, name: str = "policy") -> None:
        self._paths = paths
        self._name = name
        self._versions = VersionChain(paths)
        self._watch = EndpointWatch(paths)
        self._pauses = Pauses(paths)
        self._gates = GateWatch(paths)
        self._window = Window(paths)

    def publish(
        self,
        version: int,
        *,
        weights: str | None,
        digest: str | None = None,
        name: str | None = None,
        lineage: str = "main",
        parent: tuple[str, int] | None = None,
        settled: int | None = None,
        dropped: int | None = None,
    ) -> PolicyVersion:
        """Makes `version` the newest of policy `name`; durable and visible on return.

        Publish before an engine loads the weights: then no call is recorded as of an older version than
        it was. Publishing a version again with the same weights changes nothing. A trainer that restarts
        from an older checkpoint names a new `lineage`, and as `parent` the lineage and version that it
        restarted from. `settled` and `dropped` matter for a lineage's first version: what the trainer had
        settled by then, as `settle` counts; where absent, what `settle` was last told.

        Raises `ConfigError` where the lineage has that version with other weights, a higher version or
        another parent, or where the parent was never published.
        """
        name = self._name if name is None else name
        try:
            wanted = PolicyVersion(
                policy_name=name,
                lineage=lineage,
                version=version,
                weights=weights,
                weights_digest=digest,
                published_at=time.time(),
                parent=None if parent is None else Branch(lineage=parent[0], version=parent[1]),
            )
        except ValidationError as error:
            raise ConfigError(f"policy {name!r} version {version!r} cannot be published: {error}") from error
        state = self._window.read()
        settled = state.settled if settled is None else settled
        dropped = min(state.dropped, settled) if dropped is None else dropped

        def complete(known: tuple[PolicyVersion, ...]) -> PolicyVersion:
            base = base_of(known, wanted, settled=settled, dropped=dropped)
            parent = wanted.parent or parent_of(known, lineage)
            return wanted.model_copy(update={"base": base, "parent": parent})

        return self._versions.publish(wanted, complete)

    def versions(self) -> tuple[PolicyVersion, ...]:
        """Every published version of every policy, in order of publication."""
        return self._versions.all()

    def latest(self, name: str | None = None) -> PolicyVersion | None:
        """The version of policy `name` that was published last; None where there is none.

        One file is opened, which a network file system answers with what its server holds now.
        """
        return self._versions.latest(self._name if name is None else name)

    def lineages(self, name: str | None = None) -> tuple[Lineage, ...]:
        """The lineages of policy `name`, in order of their first publication, with their lag."""
        return lineages(self._of(name))

    def lag(self, version: int, *, lineage: str | None = None, name: str | None = None) -> int | None:
        """How many versions `version` of `lineage` (where absent: the newest one's) is behind the newest.

        Counted along the branches: across a restart from version 12, a version 10 is two behind that. None
        where the newest version does not go back to it, or where the lineage is unknown.
        """
        mine = self._of(name)
        wanted = mine[-1].lineage if mine and lineage is None else lineage
        found = next((line for line in lineages(mine) if line.name == wanted), None)
        return None if found is None else found.behind(version)

    def window(
        self,
        *,
        groups: int | None = None,
        versions: int | None = None,
        groups_per_version: int | None = None,
    ) -> WindowState:
        """Lets workers start no group that is further ahead than this; durable and visible on return.

        Groups are counted in submission order, from 0. Those below `settled + groups` may be started, and,
        with `versions` and `groups_per_version`, below `(published + versions + 1) * groups_per_version`,
        where `published` counts from the lineage's first version on. A started group always goes on to
        its end. Saying the same again changes nothing, so that a trainer says it whenever it starts; other
        numbers take the place of the old ones. Raises `ConfigError` for bounds that bound nothing.
        """
        return self._window.set(groups=groups, versions=versions, groups_per_version=groups_per_version)

    def lift_window(self) -> bool:
        """Lets workers start everything again; whether there was a window. What is settled stays."""
        return self._window.lift()

    def settle(self, settled: int, *, dropped: int | None = None) -> Allowance:
        """Tells workers that the trainer is through with `settled` groups; what they may start then.

        `settled` counts from the beginning of the run and never goes down: after a restart, saying it
        again changes nothing. `dropped`: how many of those it did not train on (zero variance, too few
        usable, stale); they take no place in `groups_per_version`. Raises `ConfigError` for numbers that
        cannot be.
        """
        state = self._window.settle(settled, dropped=dropped)
        allowed = allowance(state, self.latest())
        if allowed.limit is not None and allowed.limit <= state.settled:
            log.warning(
                "window=exhausted settled=%d limit=%d: workers start nothing more until a version is "
                "published (or tell settle what was dropped)",
                *(state.settled, allowed.limit),
            )
        return allowed

    def expect(self, *, more: bool) -> None:
        """Tells workers whether further groups will be submitted.

        Then they wait for them as long as for a window (`launch.window_wait_s`), not `launch.idle_s`.
        """
        self._window.expect(more=more)

    def allowance(self) -> Allowance:
        """What workers may start now."""
        return allowance(self._window.read(), self.latest())

    def register_endpoint(
        self, url: str, served_name: str, *, version: int | None = None, kind: str = DEFAULT_KIND
    ) -> EndpointLease:
        """Tells gateways of an inference server; it counts as live while the lease beats.

        `version`: the policy version that it serves, None where it follows the registry. `kind`: `vllm`
        or `sglang`, the engine whose API it speaks. Raises `ConfigError` for an unknown one.
        """
        return register(self._paths, Endpoint.new(url, served_name, version=version, kind=kind))

    def endpoints(self, max_silence_s: float) -> tuple[Endpoint, ...]:
        """The servers whose heartbeat moved within `max_silence_s`, see `EndpointWatch.live`."""
        return self._watch.live(max_silence_s)

    def pause(
        self,
        *,
        name: str = TRAINER,
        mode: PauseMode | str = PauseMode.CUT,
        drain_s: float = 30.0,
        max_s: float = 300.0,
        timeout_s: float | None = None,
    ) -> PauseOutcome:
        """Lets gateways admit no new model call until `resume`, and waits until they do so.

        Calls wait meanwhile, they do not fail. Those in flight may finish for `drain_s` seconds; then they
        are cut, and sent again after the pause. With mode `keep` they go on instead. Returns once every
        live worker has acted, at the latest after `timeout_s` (default: `drain_s` and 15 s); the outcome
        says who has not. The pause ends by itself after `max_s` seconds, so that a dead trainer stops
        nobody for ever; calling again under the same `name` renews it. Pauses of several names add up.

        Raises `ConfigError` for impossible bounds, and where somebody lifted the pause meanwhile.
        """
        if mode not in list(PauseMode):
            raise ConfigError(f"pause mode {mode!r} is unknown; known: {', '.join(PauseMode)}")
        if max_s <= drain_s and mode == PauseMode.CUT:
            raise ConfigError(f"max_s {max_s:g} must exceed drain_s {drain_s:g}: the pause would end first")
        pause = self._pauses.put(name, mode=PauseMode(mode), drain_s=drain_s, max_s=max_s)
        end = time.monotonic() + (drain_s + _SEEN_S if timeout_s is None else timeout_s)
        look_s = _FIRST_LOOK_S
        while (waiting := self._gates.waiting(pause)) and time.monotonic() < end:
            if self._pauses.read().find(name) != pause:
                raise ConfigError(f"pause {name!r} was lifted or renewed by somebody else; pause again")
            time.sleep(min(look_s, max(end - time.monotonic(), 0.0)))
            look_s = min(look_s * 1.5, _LONGEST_LOOK_S)
        return PauseOutcome(pause, waiting)

    def resume(self, name: str | None = TRAINER) -> bool:
        """Takes the pause of party `name` back, with None every pause; whether there was one.

        Calls go on within about a second, unless another party's pause is in force.
        """
        return self._pauses.lift(name)

    @contextmanager
    def paused(
        self,
        *,
        name: str = TRAINER,
        mode: PauseMode | str = PauseMode.CUT,
        drain_s: float = 30.0,
        max_s: float = 300.0,
        timeout_s: float | None = None,
    ) -> Iterator[PauseOutcome]:
        """`pause` on entry, `resume` on exit: publish and load new weights in between.

        Logs a warning on exit where the pause was over before.
        """
        try:
            yield self.pause(name=name, mode=mode, drain_s=drain_s, max_s=max_s, timeout_s=timeout_s)
        finally:
            if not self.resume(name):
                log.warning(
                    "pause=%s ended before this; calls were admitted meanwhile (max_s %g)", name, max_s
                )

    def pauses(self) -> tuple[Pause, ...]:
        """The pauses in force; one whose time is over counts until a gateway has noticed."""
        return self._pauses.read().pauses

    def pools(self) -> dict[str, tuple[PoolLine, ...]]:
        """The ledgers of `Run.replenish` by the key of their pool; raises `CorruptRecordError`."""
        return read_pools(self._paths)

    def _of(self, name: str | None) -> tuple[PolicyVersion, ...]:
        wanted = self._name if name is None else name
        return tuple(entry for entry in self.versions() if entry.policy_name == wanted)
