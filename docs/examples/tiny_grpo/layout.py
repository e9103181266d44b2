"""Where the loop keeps what, and the numbers that it is run with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TRAINER = "grpo"


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of one loop, all below `root`."""

    root: Path

    @property
    def run(self) -> Path:
        """The run whose rollouts are trained on."""
        return self.root / "run"

    @property
    def held_out(self) -> Path:
        """The run whose rollouts are only looked at: prompts that are never trained on."""
        return self.root / "held_out"

    @property
    def checkpoint(self) -> Path:
        """The trainer after its latest step: model, optimiser and the reader's position, in one file."""
        return self.root / "trainer.pt"

    def weights(self, version: int) -> Path:
        """The weights of a policy version."""
        return self.root / "weights" / f"{version:04d}.pt"

    def step(self, number: int) -> Path:
        """What the trainer says of one step, as JSON."""
        return self.root / "steps" / f"{number:04d}.json"

    def log(self, program: str) -> Path:
        """The output of one of the loop's processes, over all its starts."""
        return self.root / f"{program}.log"

    def make(self) -> None:
        for folder in (self.weights(0).parent, self.step(0).parent):
            folder.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, slots=True)
class Settings:
    """The loop's numbers; the defaults learn in a few minutes on two cores."""

    steps: int = 30
    groups_per_step: int = 12
    samples: int = 8
    """Rollouts of each prompt: a group."""
    held_out_prompts: int = 32
    """Prompts that every version is evaluated on, one rollout each."""
    learning_rate: float = 2e-4
    passes: int = 4
    """How often a step goes over its micro-batches; each time each of them is an update."""
    clip: float = 0.25
    """How far a step may move a token's probability: by a factor of 1 + clip."""
    max_ratio: float = 2.0
    """Bound of the importance weights."""
    max_lag: int = 4
    """Rollouts with a token that is more versions old than this are not trained on."""
    versions_ahead: int = 1
    """How many versions ahead of the trainer workers may sample."""
    max_tokens: int = 1280
    """Tokens in one micro-batch."""
