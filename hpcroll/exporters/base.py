"""What an exporter is: a part of a run in, whole files of a trainer's format out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

from hpcroll.config import Strict
from hpcroll.policy import PolicyRegistry
from hpcroll.shards import Column, StoredTrajectory


class Fact(StrEnum):
    """What a trajectory holds and a format may have no place for."""

    TEXT = "text"
    """Messages and replies."""
    CONTEXT = "context"
    """The ids of tokens that no policy sampled."""
    CONTEXT_ROLES = "context_roles"
    """Whose words each context token is."""
    SEGMENTS = "segments"
    """The forest: a segment's role, parent, why it began and ended."""
    UNTRAINED = "untrained"
    """Rollouts and segments that are not trained on, or have no valid reward."""
    SAMPLED = "sampled"
    """Which tokens a policy sampled, also where they are not trained on."""
    VERSIONS = "versions"
    """The policy version of each token."""
    VERSION_RANGES = "version_ranges"
    """That a token's version is only known to lie between two."""
    LINEAGE = "lineage"
    """The policy's name and lineage."""
    SAMPLING = "sampling"
    """The sampling parameters of each token."""
    LOGPROB_KIND = "logprob_kind"
    """Of which distribution a log-probability is."""
    REWARD = "reward"
    """The outcome reward as it was given."""
    VERDICT = "verdict"
    """Named components of the reward, tests, the evaluator."""
    GROUP = "group"
    """Which rollouts are of one group."""
    ROLLOUT = "rollout"
    """Which rows are of one rollout."""
    WEIGHT = "weight"
    """A segment's share of its rollout, and the rollout's weight."""
    STATUS = "status"
    """How the rollout ended."""
    TASK = "task"
    """The task's name."""
    IDENTITY = "identity"
    """Harness, image, config and their digests, attempts."""
    CALLS = "calls"
    """Model calls: where each one's samples stand, finish reason, usage, latency, endpoint."""
    ACTIONS = "actions"
    """The agent's tool calls: exit codes, durations, sizes."""
    TIMING = "timing"
    """Stage times, node, resources."""


class Unit(StrEnum):
    """In what rollouts are handed out."""

    ROLLOUT = "rollout"
    """One by one, as they are committed."""
    GROUP = "group"
    """With their group, since the format needs what only a group tells (an advantage, a baseline)."""


@dataclass(frozen=True, slots=True)
class GroupSlice:
    """Rollouts of one group that are exported together; `members` by sample index."""

    group_id: str
    members: tuple[StoredTrajectory, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an export, `number` 0, 1, ...: what is in it never changes once it is decided."""

    number: int
    run_id: str
    groups: tuple[GroupSlice, ...]

    @property
    def members(self) -> Iterator[StoredTrajectory]:
        for group in self.groups:
            yield from group.members


class Exporter(Protocol):
    """Writes parts of a run in one format. Constructed without I/O.

    `files` is called again with the same part after a crash and must then give the same bytes: no clock, no
    random numbers.
    """

    Options: ClassVar[type[Strict]]
    """Model of its options."""
    loses: ClassVar[tuple[Fact, ...]]
    """What the format has no place for."""
    source: ClassVar[str]
    """Where the format is defined: project, version or commit, file."""
    columns: ClassVar[frozenset[Column]]
    """What is read of a rollout besides its summary."""
    unit: ClassVar[Unit]

    def __init__(self, options: Strict) -> None:
        """Raises `ConfigError` where a package that it needs is not installed."""
        ...

    @property
    def groups_per_part(self) -> int | None:
        """So many groups with a usable rollout make a part, the last may have fewer; None: as many as fit."""
        ...

    def names(self, number: int) -> tuple[str, ...]:
        """The names of the files of part `number`, where they follow from it; else nothing."""
        ...

    def files(self, part: Part) -> Iterator[tuple[str, bytes]]:
        """The part's files: names relative to the output directory, and whole contents."""
        ...


class Bridge(Protocol):
    """Keeps pace with a trainer that is running."""

    def may_go_on(self, number: int) -> bool:
        """Whether the trainer is far enough for part `number`; polled, passes on what the trainer says."""
        ...

    def unread(self, number: int) -> bool:
        """Whether the trainer may still want the files of part `number`, so that they must be there."""
        ...


@runtime_checkable
class Bridged(Protocol):
    """An exporter whose trainer reads live."""

    def bridge(self, out: Path, policy: PolicyRegistry) -> Bridge:
        """The bridge over output directory `out`, which publishes new versions in `policy`."""
        ...
