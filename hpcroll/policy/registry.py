"""Policy versions: a chain of immutable files, so that publications have one order for everyone."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from pydantic import ValidationError

from hpcroll.contract.policy import PolicyVersion
from hpcroll.errors import ConfigError, CorruptRecordError
from hpcroll.fs.atomic import publish, read_fresh, replace
from hpcroll.fs.paths import RunPaths
from hpcroll.policy.endpoints import DEFAULT_KIND, Endpoint, EndpointLease, EndpointWatch, register
from hpcroll.policy.gates import GateWatch
from hpcroll.policy.pauses import Pause, PauseMode, Pauses

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
    """The policy versions, inference servers and pauses of one run. Not for several threads at once.

    `name`: the policy that is meant where a call names none.
    """

    def __init__(self, paths: RunPaths, *, name: str = "policy") -> None:
        self._paths = paths
        self._name = name
        self._chain: dict[int, PolicyVersion] = {}
        """Entries read so far, by their place in the chain; immutable, so never read twice."""
        self._watch = EndpointWatch(paths)
        self._pauses = Pauses(paths)
        self._gates = GateWatch(paths)

    def publish(
        self,
        version: int,
        *,
        weights: str | None,
        digest: str | None = None,
        name: str | None = None,
        lineage: str = "main",
    ) -> PolicyVersion:
        """Makes `version` the newest of policy `name`; durable and visible on return.

        Publish before an engine loads the weights: then no call is recorded as of an older version than
        it was. Publishing a version again with the same weights changes nothing. Raises `ConfigError`
        where the lineage has that version with other weights, or a higher version.
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
            )
        except ValidationError as error:
            raise ConfigError(f"policy {name!r} version {version!r} cannot be published: {error}") from error
        while True:
            known = self.versions()
            published = _published_before(known, wanted)
            if published is not None:
                break
            # One winner per place: whoever loses it looks at the winner's entry before it goes on.
            if publish(self._paths.policy_version(len(known)), wanted.to_json().encode()):
                published = wanted
                break
        self._repair_latest(name)
        return published

    def versions(self) -> tuple[PolicyVersion, ...]:
        """Every published version of every policy, in order of publication."""
        self._read_chain()
        return tuple(self._chain[place] for place in range(len(self._chain)))

    def latest(self, name: str | None = None) -> PolicyVersion | None:
        """The version of policy `name` that was published last; None where there is none.

        One file is opened, which a network file system answers with what its server holds now.
        """
        path = self._paths.policy_latest(self._name if name is None else name)
        data = read_fresh(path)
        return None if data is None else self._parse(data, str(path))

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

    def _read_chain(self) -> None:
        while (data := read_fresh(self._paths.policy_version(len(self._chain)))) is not None:
            place = len(self._chain)
            self._chain[place] = self._parse(data, str(self._paths.policy_version(place)))

    def _repair_latest(self, name: str) -> None:
        """Points `latest` at the last entry of the chain, also where its publisher died before it could."""
        while True:
            mine = [entry for entry in self.versions() if entry.policy_name == name]
            current = self.latest(name)
            if not mine or current == mine[-1]:
                return
            replace(self._paths.policy_latest(name), mine[-1].to_json().encode())

    @staticmethod
    @lru_cache(maxsize=16)  # the latest one is read for every call, and seldom another than before
    def _parse(data: bytes, where: str) -> PolicyVersion:
        try:
            return PolicyVersion.from_json(data)
        except ValidationError as error:
            raise CorruptRecordError(f"{where} is not a policy version: {error}") from error


def _published_before(known: tuple[PolicyVersion, ...], wanted: PolicyVersion) -> PolicyVersion | None:
    """The entry that `wanted` repeats, or None where it is new; raises `ConfigError` where it conflicts."""
    line = [e for e in known if (e.policy_name, e.lineage) == (wanted.policy_name, wanted.lineage)]
    for entry in line:
        if entry.version == wanted.version:
            if entry.same_weights(wanted):
                return entry
            raise ConfigError(
                f"version {wanted.version} of policy {wanted.policy_name!r}, lineage {wanted.lineage!r}, was "
                f"published with weights {entry.weights!r} (digest {entry.weights_digest}), not "
                f"{wanted.weights!r} (digest {wanted.weights_digest}); publish a new version, or name a new "
                "lineage if training restarted from an older checkpoint"
            )
    highest = max((entry.version for entry in line), default=-1)
    if wanted.version < highest:
        raise ConfigError(
            f"version {wanted.version} of policy {wanted.policy_name!r} is older than version {highest} of "
            f"lineage {wanted.lineage!r}; name a new lineage if training restarted from an older checkpoint"
        )
    return None
