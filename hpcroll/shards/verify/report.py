"""What verification found."""

from __future__ import annotations

from dataclasses import dataclass, field

_MOST_FINDINGS = 1000


@dataclass(slots=True)
class VerifyReport:
    """What `verify_run` found. `problems` name what breaks a promise; the counts are for people."""

    shards: int = 0
    """Level-0 shards that are there."""
    packs: int = 0
    done: int = 0
    committed: int = 0
    """Rollouts that `done` confirms and that have a record whose every byte is as written."""
    lost: int = 0
    """Rollouts that `done` confirms and that have none, on either level."""
    packed: int = 0
    """Committed records in packs."""
    superseded: int = 0
    """Level-0 records of attempts that lost."""
    unconfirmed: int = 0
    """Level-0 records of rollouts that nobody has committed."""
    unmarked: int = 0
    """Committed level-0 records without a mark; readers find them by scanning."""
    torn_bytes: int = 0
    """Bytes of finished shards that hold no sound record and that `done` does not miss."""
    removed_shards: int = 0
    """Level-0 shards that were packed and then removed."""
    orphans: int = 0
    """Data files that no manifest names: of packers that died or are at work."""
    action_tokens: int = 0
    problems: list[str] = field(default_factory=list)
    problems_left_off: int = 0

    @property
    def ok(self) -> bool:
        """Whether every promise holds."""
        return not self.problems

    def add(self, problem: str) -> None:
        """Notes a problem; beyond the first thousand they are only counted."""
        if len(self.problems) < _MOST_FINDINGS:
            self.problems.append(problem)
        else:
            self.problems_left_off += 1
