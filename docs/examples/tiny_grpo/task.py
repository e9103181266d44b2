"""The task: arithmetic put in words, to be computed with a shell and handed in; right or wrong is checked.

The model is never told what the words mean: it has to find out by the rewards of what it tried.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from hpcroll.contract import Task

TRAINED, HELD_OUT = "tiny_grpo/trained", "tiny_grpo/held_out"


@dataclass(frozen=True, slots=True)
class Phrase:
    """A way to ask for one operation on two numbers, in the order of the text."""

    words: str
    operator: str

    def prompt(self, first: int, second: int) -> str:
        return self.words.format(first, second)


PHRASES = (
    Phrase("add {} and {}", "+"),
    Phrase("{} minus {}", "-"),
    Phrase("{} times {}", "*"),
    Phrase("{} over {}", "/"),
)
OPERATORS = "+-*/"


def compute(operator: str, first: int, second: int) -> int:
    """What a shell makes of it, for positive numbers."""
    return {
        "+": first + second,
        "-": first - second,
        "*": first * second,
        "/": first // second,
    }[operator]


def is_held_out(first: int, second: int) -> bool:
    """Whether this pair of numbers is kept for evaluation: one pair of five is."""
    return (first * 31 + second * 17) % 5 == 0


def sample_problems(count: int, *, held_out: bool, seed: int) -> list[tuple[Phrase, int, int]]:
    """`count` different problems from one side of the split, with two-digit numbers."""
    rng = random.Random(f"{seed} {held_out}")
    problems: dict[tuple[str, int, int], tuple[Phrase, int, int]] = {}
    while len(problems) < count:
        # Phrase by phrase in turn: a small evaluation set has as much of each.
        phrase = PHRASES[len(problems) % len(PHRASES)]
        second = rng.randint(10, 49)
        first = rng.randint(2 * second, 99)  # so that no two operations have the same result
        if is_held_out(first, second) is held_out:
            problems.setdefault((phrase.words, first, second), (phrase, first, second))
    return list(problems.values())


def make_tasks(count: int, *, held_out: bool, seed: int) -> list[Task]:
    """`count` tasks for hpcroll; the handler `stem` compares the submitted number with the right one."""
    return [
        Task(
            task_id=f"{number}: {phrase.prompt(first, second)}",
            handler="stem",
            prompt=phrase.prompt(first, second),
            dataset=HELD_OUT if held_out else TRAINED,
            spec={"answer": str(compute(phrase.operator, first, second)), "relative_tolerance": 0.0},
        )
        for number, (phrase, first, second) in enumerate(sample_problems(count, held_out=held_out, seed=seed))
    ]
