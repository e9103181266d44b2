"""What a pool is filled with: its settings, and the order in which it goes through its tasks."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from hpcroll.api.pool_watch import GroupUse
from hpcroll.contract import Task, sha256_hex
from hpcroll.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How full a pool is kept, and of what; see `Run.replenish`."""

    samples: int
    key: str
    groups_per_step: int
    oversample: float = 1.25
    steps_ahead: int = 1
    steps: int | None = None
    epochs: int | None = None
    exclude_after: int | None = None
    seed: int = 0
    use: GroupUse = field(default_factory=GroupUse)

    def __post_init__(self) -> None:
        least = {"samples": 1, "groups_per_step": 1, "oversample": 1, "steps_ahead": 1}
        least |= {"steps": 1, "epochs": 1, "exclude_after": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and not value >= bound:
                raise ConfigError(f"replenish: {name} is {value}; it must be {bound} or more")
        if not self.key:
            raise ConfigError("replenish: the pool needs a key: any text that names it, such as 'epoch0'")

    @property
    def target(self) -> int:
        """Groups that are kept open."""
        return math.ceil(self.groups_per_step * self.oversample * self.steps_ahead)

    def target_after(self, step: int) -> int:
        """The same after step `step`: no more than the steps that are left need."""
        if self.steps is None:
            return self.target
        left = max(0, self.steps - step)
        return min(self.target, math.ceil(self.groups_per_step * self.oversample * left))


@dataclass(frozen=True, slots=True)
class TaskOrder:
    """The tasks of a pool, each epoch in an order of its own."""

    tasks: Sequence[Task]
    settings: PoolSettings

    def digest(self) -> str:
        """SHA-256 (hex) of what decides which groups a pool submits."""
        parts = [
            str(self.settings.samples),
            str(self.settings.seed),
            *(task.to_json() for task in self.tasks),
        ]
        return sha256_hex("\n".join(parts).encode())

    def take(
        self, count: int, epoch: int, offset: int, excluded: Collection[str]
    ) -> tuple[tuple[tuple[int, ...], ...], int, int]:
        """The next `count` tasks by index, in parts of one epoch each, and where the next one stands.

        Fewer where nothing is left.
        """
        parts: dict[int, list[int]] = {}
        walk = self.walk(epoch, offset, excluded)
        for _, (found_epoch, place, index) in zip(range(count), walk, strict=False):
            parts.setdefault(found_epoch, []).append(index)
            epoch, offset = found_epoch, place + 1
        return tuple(map(tuple, parts.values())), epoch, offset

    def walk(self, epoch: int, offset: int, excluded: Collection[str]) -> Iterator[tuple[int, int, int]]:
        """Epoch, place in its order, and task index, from there on; ends where nothing is left."""
        if all(task.task_id in excluded for task in self.tasks):
            return
        while self.settings.epochs is None or epoch < self.settings.epochs:
            order = list(range(len(self.tasks)))
            random.Random(f"{self.settings.seed}/{epoch}").shuffle(order)
            for place in range(offset, len(order)):
                if self.tasks[order[place]].task_id not in excluded:
                    yield epoch, place, order[place]
            epoch, offset = epoch + 1, 0
