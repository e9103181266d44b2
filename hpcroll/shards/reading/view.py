"""What a reader was asked for: which run, which part of it, how to wait, and under whose name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.run_facts import RunFacts
from hpcroll.shards.reading.feed import Following
from hpcroll.shards.reading.groups import COMPLETE, GroupRule
from hpcroll.shards.reading.plan import PlanFiles
from hpcroll.shards.reading.planner import StepSettings
from hpcroll.shards.reading.selection import Selection
from hpcroll.shards.reading.shuffle import EVERYTHING, Part, Shuffle


@dataclass(frozen=True, slots=True)
class View:
    """Immutable; a reader made from another one has a view of its own."""

    paths: RunPaths
    facts: RunFacts
    selection: Selection
    shuffle: Shuffle | None = None
    part: Part = EVERYTHING
    following: Following | None = None
    rule: GroupRule = COMPLETE
    max_lag: int | None = None
    trainer: str | None = None
    hold_s: float = 0.0
    rank: int = 0
    world: int = 1

    def identity(self) -> dict[str, Any]:
        """What a saved state must agree with: its stream and the order of it."""
        return {
            "run_id": self.facts.run_id,
            "trainer": self.trainer,
            "part": [self.part.index, self.part.count],
            "shuffle": None if self.shuffle is None else [self.shuffle.seed, self.shuffle.window],
        }

    def planned_under(self, settings: StepSettings) -> dict[str, Any]:
        """What a branch of plans depends on."""
        return {
            **settings.to_json(),
            "min_usable": self.rule.min_usable,
            "max_lag": self.max_lag,
            "selection": self.selection.to_json(),
        }

    def plan_files(self, branch: str) -> PlanFiles | None:
        """The plans of a branch; None for a reader without a name, which writes nothing."""
        return None if self.trainer is None else PlanFiles(self.paths, self.trainer, branch)
