"""Which policy versions may have served a call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from hpcroll.contract import PolicyId


async def _unknown() -> PolicyId | None:
    return None


@dataclass(frozen=True, slots=True)
class PolicySource:
    """What the policy registry knows; the parts that are not awaited must not block."""

    known: Callable[[], PolicyId | None] = lambda: None
    """The version that was published last, as of about a second ago; None where there is no registry."""
    read: Callable[[], Awaitable[PolicyId | None]] = _unknown
    """The same, read anew."""
    history: Callable[[], Sequence[PolicyId]] = tuple
    """The versions that were published of late, oldest first."""


def served_by(
    before: PolicyId | None,
    after: PolicyId | None,
    *,
    name: str,
    named: Sequence[int] = (),
    fixed: int | None = None,
    history: Sequence[PolicyId] = (),
) -> PolicyId | None:
    """The policy of a call, as exactly as it is known and no more so.

    `before` and `after`: what the registry named last when the call was sent and, read anew, when its last
    token was there. `named`: the versions that the engine named; `fixed`: the version that its server was
    registered with, which counts where the engine named none. `history`: published versions, oldest first.

    What the engine says is exact. Without its word the range spans the versions before and after, and the
    one that was published before those, since a silent engine may still have been loading when the call
    began. Versions of two lineages span no range: such a call is the older lineage's, so that nobody who
    trains on the newer one takes it for his own.
    """
    known = after or before
    said = tuple(named) or (() if fixed is None else (fixed,))
    if said:
        low, high = min(said), max(said)
        lineage = known.lineage if known is not None else ""
        return PolicyId(
            policy_name=known.policy_name if known is not None else name,
            lineage=_lineage_of((low, high), history) or lineage,
            version_low=low,
            version_high=high,
        )
    if known is None:
        return None
    first, last = before or known, after or known
    if first.lineage != last.lineage:
        last = first
    low = min(first.version_low, last.version_low)
    return first.model_copy(
        update={
            "version_low": _predecessor(low, first.lineage, history),
            "version_high": max(first.version_high, last.version_high),
        }
    )


def _predecessor(version: int, lineage: str, history: Sequence[PolicyId]) -> int:
    """The version that was published before `version`; trainers may leave numbers out."""
    older = [entry.version_high for entry in history if entry.lineage == lineage]
    return max((other for other in older if other < version), default=max(version - 1, 0))


def _lineage_of(said: tuple[int, int], history: Sequence[PolicyId]) -> str | None:
    """The lineage that was published last with each of these versions; the older one where they differ."""
    places = []
    for version in said:
        found = [place for place, entry in enumerate(history) if entry.version_high == version]
        if found:
            places.append(found[-1])
    return history[min(places)].lineage if places else None
