"""Lineages: a trainer that restarts from an older checkpoint begins one, and how far each is behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcroll.contract.policy import Branch, LineageBase, PolicyVersion
from hpcroll.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Lineage:
    """The versions of a policy that one training run published, and where they stand now."""

    policy_name: str
    name: str
    first: int
    latest: int
    count: int
    """How many versions were published."""
    parent: Branch | None
    """Where it left another lineage."""
    kept: int | None
    """The last of its versions that the newest one goes back to; None where it does not go back to it."""
    lag: int | None
    """How many versions the newest is ahead of `kept`; 0 for the lineage of the newest one."""

    def behind(self, version: int) -> int | None:
        """How many versions `version` is behind the newest; None where that does not go back to it."""
        if self.kept is None or self.lag is None or version > self.kept:
            return None
        return self.lag + self.kept - version


def lineages(versions: Sequence[PolicyVersion]) -> tuple[Lineage, ...]:
    """The lineages of one policy's `versions`, in order of their first publication."""
    lines: dict[str, list[PolicyVersion]] = {}
    for entry in versions:
        lines.setdefault(entry.lineage, []).append(entry)
    ancestors = _ancestry(versions)
    found = []
    for name, line in lines.items():
        kept, lag = ancestors.get(name, (None, None))
        found.append(
            Lineage(
                policy_name=line[0].policy_name,
                name=name,
                first=line[0].version,
                latest=line[-1].version,
                count=len(line),
                parent=line[0].parent,
                kept=kept,
                lag=lag,
            )
        )
    return tuple(found)


def _ancestry(versions: Sequence[PolicyVersion]) -> dict[str, tuple[int, int]]:
    """What the last of one policy's `versions` goes back to.

    By lineage, its own included: the last version that counts, and how many versions behind that is.
    """
    line: dict[str, tuple[int, int]] = {}
    firsts = {entry.lineage: entry for entry in reversed(versions)}
    lineage, version, behind = (versions[-1].lineage, versions[-1].version, 0) if versions else ("", 0, 0)
    while lineage in firsts and lineage not in line:
        line[lineage] = (version, behind)
        first = firsts[lineage]
        if first.parent is None:
            break
        behind += version - first.base.version
        lineage, version = first.parent.lineage, first.parent.version
    return line


def parent_of(versions: Sequence[PolicyVersion], lineage: str) -> Branch | None:
    """Where `lineage` left another one; None where it did not, or begins only now."""
    return next((entry.parent for entry in versions if entry.lineage == lineage), None)


def base_of(
    versions: Sequence[PolicyVersion], wanted: PolicyVersion, *, settled: int, dropped: int
) -> LineageBase:
    """Where the lineage of `wanted`, the next of one policy's versions, begins.

    `settled`, `dropped`: groups so far. A first version right after its parent, or a first version 1 where
    nothing was published, was made by a step already: the lineage begins with what that step began with.
    Raises `ConfigError` where the parent was never published, or is another one than the lineage has.
    """
    parent = wanted.parent
    first = next((entry for entry in versions if entry.lineage == wanted.lineage), None)
    if first is not None:
        if parent is not None and parent != first.parent:
            raise ConfigError(
                f"lineage {wanted.lineage!r} of policy {wanted.policy_name!r} began "
                f"{_spell(first.parent)}, not {_spell(parent)}; name a new lineage"
            )
        return first.base
    if parent is not None and not any(
        (entry.lineage, entry.version) == (parent.lineage, parent.version) for entry in versions
    ):
        known = ", ".join(dict.fromkeys(entry.lineage for entry in versions)) or "none"
        raise ConfigError(
            f"lineage {wanted.lineage!r} of policy {wanted.policy_name!r} cannot begin {_spell(parent)}: "
            f"that was never published; known lineages: {known}"
        )
    before = 0 if parent is None else parent.version
    version = before if wanted.version == before + 1 else wanted.version
    return LineageBase(version=version, settled=settled, dropped=dropped)


def _spell(parent: Branch | None) -> str:
    return "with no parent" if parent is None else f"from {parent.lineage!r} at version {parent.version}"
