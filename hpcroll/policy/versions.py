"""Policy versions: a chain of immutable files, so that publications have one order for everyone."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from hpcroll.contract.policy import PolicyVersion
from hpcroll.errors import ConfigError, CorruptRecordError
from hpcroll.fs.atomic import publish, read_fresh, replace
from hpcroll.fs.paths import RunPaths


class VersionChain:
    """The published versions of one run. For one thread."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._read: list[PolicyVersion] = []
        """Entries read so far, by their place in the chain; immutable, so never read twice."""

    def all(self) -> tuple[PolicyVersion, ...]:
        """Every published version of every policy, in order of publication."""
        while (entry := _read(self._paths.policy_version(len(self._read)))) is not None:
            self._read.append(entry)
        return tuple(self._read)

    def latest(self, name: str) -> PolicyVersion | None:
        """The version of policy `name` that was published last; None where there is none.

        One file is opened, which a network file system answers with what its server holds now.
        """
        return _read(self._paths.policy_latest(name))

    def publish(
        self, wanted: PolicyVersion, complete: Callable[[tuple[PolicyVersion, ...]], PolicyVersion]
    ) -> PolicyVersion:
        """Makes `wanted` the newest of its policy, or finds the entry that it repeats.

        `complete` fills in what depends on the policy's earlier versions, which it is given. Raises
        `ConfigError` where the lineage has that version with other weights, or a higher version.
        """
        name = wanted.policy_name
        while True:
            known = self.all()
            mine = tuple(entry for entry in known if entry.policy_name == name)
            published = _published_before(mine, wanted)
            entry = complete(mine) if published is None else published
            # One winner per place: whoever loses it looks at the winner's entry before it goes on.
            if published or publish(self._paths.policy_version(len(known)), entry.to_json().encode()):
                self._repair_latest(name)
                return entry

    def _repair_latest(self, name: str) -> None:
        """Points `latest` at the last entry of the chain, also where its publisher died before it could."""
        while True:
            mine = [entry for entry in self.all() if entry.policy_name == name]
            if not mine or self.latest(name) == mine[-1]:
                return
            replace(self._paths.policy_latest(name), mine[-1].to_json().encode())


def read_latest(paths: RunPaths, name: str) -> PolicyVersion | None:
    """The newest version of policy `name`; see `VersionChain.latest`."""
    return _read(paths.policy_latest(name))


def _read(path: Path) -> PolicyVersion | None:
    data = read_fresh(path)
    return None if data is None else _parse(data, str(path))


@lru_cache(maxsize=16)  # the latest one is read for every call, and seldom another than before
def _parse(data: bytes, where: str) -> PolicyVersion:
    try:
        return PolicyVersion.from_json(data)
    except ValidationError as error:
        raise CorruptRecordError(f"{where} is not a policy version: {error}") from error


def _published_before(mine: tuple[PolicyVersion, ...], wanted: PolicyVersion) -> PolicyVersion | None:
    """The entry that `wanted` repeats, or None where it is new; raises `ConfigError` where it conflicts."""
    line = [entry for entry in mine if entry.lineage == wanted.lineage]
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
