"""What a perfect agent does, and what a wrong one does, for every task of hpcroll's own families.

As artefacts, to try a verifier without an agent; and as scripts of the policy server, to try everything.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from hpcroll.contract import Task
from hpcroll.errors import ConfigError
from hpcroll.evaluators.math_answer import MathSpec
from hpcroll.evaluators.program import ProgramSpec, assemble
from hpcroll.evaluators.quantity import QuantitySpec
from hpcroll.evaluators.repository import RepositorySpec
from hpcroll.evaluators.reward_file import CommandSpec
from hpcroll.testing.policy_server import Script, fails, solves

_PIECE_CHARS = 30_000  # one argument of a command may have 128 KiB


@dataclass(frozen=True, slots=True)
class Actions:
    """Shell commands of an agent, and what it submits after them."""

    commands: tuple[str, ...]
    answer: str


def oracle_actions(task: Task) -> Actions:
    """What earns the task's full reward; raises `ConfigError` where the task does not hold its solution."""
    return _family(task).right(task)


def wrong_actions(task: Task) -> Actions:
    """Honest work that earns no reward."""
    return _family(task).wrong(task)


def oracle_script(task: Task) -> Script:
    """Makes the policy server solve the task."""
    right = oracle_actions(task)
    return Script(prompt=task.prompt, behaviours=(solves(right.commands, right.answer),))


def wrong_script(task: Task) -> Script:
    """Makes the policy server fail the task."""
    wrong = wrong_actions(task)
    return Script(prompt=task.prompt, behaviours=(fails(wrong.commands, wrong.answer),))


def mixed_script(task: Task, *, solves_weight: float = 2.0, fails_weight: float = 1.0) -> Script:
    """Makes the policy server solve the task in some rollouts and fail it in others, by their ids."""
    right, wrong = oracle_actions(task), wrong_actions(task)
    behaviours = (
        solves(right.commands, right.answer, weight=solves_weight),
        fails(wrong.commands, wrong.answer, weight=fails_weight),
    )
    return Script(prompt=task.prompt, behaviours=behaviours)


@dataclass(frozen=True, slots=True)
class _Family:
    right: Callable[[Task], Actions]
    wrong: Callable[[Task], Actions]


def _family(task: Task) -> _Family:
    family = _FAMILIES.get(task.handler)
    if family is None:
        raise ConfigError(
            f"task {task.task_id}: no oracle for handler {task.handler!r}; known: {', '.join(_FAMILIES)}"
        )
    return family


def _right_math(task: Task) -> Actions:
    answer = MathSpec.model_validate(task.spec).answer
    return Actions((f"printf '%s\\n' {shlex.quote(answer)}",), answer)


def _wrong_math(task: Task) -> Actions:
    text = MathSpec.model_validate(task.spec).answer.replace(",", "")
    try:
        return Actions(("ls",), f"{_off(float(text)):g}")
    except ValueError:
        return Actions(("ls",), "-987654321")  # wrong for any formula worth asking for


def _right_stem(task: Task) -> Actions:
    spec = QuantitySpec.model_validate(task.spec)
    answer = f"{spec.answer} {spec.unit}".strip()
    return Actions((f"printf '%s\\n' {shlex.quote(answer)}",), answer)


def _wrong_stem(task: Task) -> Actions:
    spec = QuantitySpec.model_validate(task.spec)
    number = spec.answer.replace("\u2212", "-").replace(",", "")
    return Actions(("ls",), f"{_off(float(number)):g} {spec.unit}".strip())


def _right_code(task: Task) -> Actions:
    spec = ProgramSpec.model_validate(task.spec)
    program = assemble(spec.prefix, _known(task, spec.solution, "solution"))
    commands = (*write_file(spec.solution_file, program), f"python3 {shlex.quote(spec.solution_file)}")
    return Actions(commands, f"The program is in {spec.solution_file}.")


def _wrong_code(task: Task) -> Actions:
    spec = ProgramSpec.model_validate(task.spec)
    program = f"def {spec.entry_point or 'answer'}(*arguments):\n    return None\n"
    return Actions(write_file(spec.solution_file, program), f"The program is in {spec.solution_file}.")


def _right_swe(task: Task) -> Actions:
    patch = _known(task, RepositorySpec.model_validate(task.spec).gold_patch, "gold_patch")
    # Inside .git the file is no part of what the agent leaves.
    apply = "git apply --whitespace=nowarn .git/gold.patch"
    return Actions((*write_file(".git/gold.patch", patch), apply, "git status --short"), "Done.")


def _wrong_swe(task: Task) -> Actions:
    note = "printf 'I looked at it and found nothing.\\n' > FINDINGS.txt"
    return Actions((note, "git status --short"), "Done.")


def _right_command(task: Task) -> Actions:
    spec = CommandSpec.model_validate(task.spec)
    return Actions((_known(task, spec.solution, "solution"),), spec.solution_answer)


def _wrong_command(task: Task) -> Actions:
    return Actions(("ls",), "I do not know")


_FAMILIES = {
    "swe": _Family(_right_swe, _wrong_swe),
    "math": _Family(_right_math, _wrong_math),
    "stem": _Family(_right_stem, _wrong_stem),
    "code": _Family(_right_code, _wrong_code),
    "command": _Family(_right_command, _wrong_command),
}


def write_file(path: str, text: str) -> tuple[str, ...]:
    """Shell commands that write `text` into `path`, in pieces that fit into an argument."""
    pieces = [text[start : start + _PIECE_CHARS] for start in range(0, len(text), _PIECE_CHARS)] or [""]
    name = shlex.quote(path)
    return tuple(
        f"printf '%s' {shlex.quote(piece)} {'>' if index == 0 else '>>'} {name}"
        for index, piece in enumerate(pieces)
    )


def _known(task: Task, value: str | None, field: str) -> str:
    if value is None:
        raise ConfigError(f"task {task.task_id}: spec has no {field}, so nobody knows how to solve it")
    return value


def _off(number: float) -> float:
    """A number that no tolerance takes for `number`, nor for a power of ten of it."""
    return number + 3.7 * (1 + math.fabs(number))
