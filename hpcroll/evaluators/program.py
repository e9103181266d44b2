"""Programs scored by unit tests in a fresh sandbox.

The tests share the candidate's process, as the data sets of this kind have it: exiting early or printing
does not pass them, but a candidate written to find the runner's own file name could.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import ClassVar

from pydantic import Field

from hpcroll.config import EvaluationConfig, Strict
from hpcroll.contract import Task, Verdict
from hpcroll.errors import EvaluatorError
from hpcroll.evaluators.base import Artefacts, FreshSandbox
from hpcroll.evaluators.commands import tail
from hpcroll.sandboxes.base import Sandbox

_FENCE = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

_RUNNER = """\
import sys
from pathlib import Path

here = Path(__file__)
program = here.with_name("program.py").read_text(encoding="utf-8")
tests = here.with_name("tests.py").read_text(encoding="utf-8")
names = {"__name__": "program"}
exec(compile(program, "program.py", "exec"), names)
exec(compile(tests, "tests.py", "exec"), names)
if len(sys.argv) > 1:
    names["check"](names[sys.argv[1]])
here.with_suffix(".passed").touch()
"""


class ProgramSpec(Strict):
    """A program to write, and the tests that it must pass."""

    tests: str = Field(min_length=1)
    """Python code run after the program: asserts, or a function `check(candidate)`."""
    entry_point: str | None = None
    """Name that `check` is called with; without it the code in `tests` is all."""
    prefix: str = ""
    """Code that stands before the candidate's, such as imports or the head of a function to complete."""
    solution_file: str = "solution.py"
    """File in the work directory where the agent leaves its program; its submitted answer where absent."""
    solution: str | None = None
    """A program, or the rest of one, that passes the tests; never in a sandbox of the agent."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Longest that program and tests may take together, in seconds."""
    program_bytes: int = Field(default=1 << 20, ge=1, le=16 << 20)
    """Largest program that counts, in bytes."""


class ProgramEvaluator:
    """Reward 1.0 where the program passes every test, else 0.0."""

    Spec: ClassVar[type[Strict]] = ProgramSpec

    def __init__(self, config: EvaluationConfig) -> None:
        self._log_bytes = config.log_bytes

    async def evaluate(self, task: Task, artefacts: Artefacts, fresh: FreshSandbox) -> Verdict:
        """The verdict on artefact `solution`, or on `answer`; raises `EvaluatorError` without a Python."""
        started_s = time.monotonic()
        spec = ProgramSpec.model_validate(task.spec)
        source = artefacts.get("solution") or artefacts.get("answer") or b""
        passed, exit_code, log = False, None, "the agent left no program"
        if len(source) > spec.program_bytes:
            log = f"the program has {len(source)} bytes, more than the limit of {spec.program_bytes}"
        elif source.strip():
            async with fresh() as sandbox:
                passed, exit_code, log = await self._run(spec, source, sandbox)
        return Verdict(
            reward=1.0 if passed else 0.0,
            evaluator="program",
            exit_code=exit_code,
            log_tail=log[-self._log_bytes :] if self._log_bytes else "",
            duration_s=time.monotonic() - started_s,
        )

    async def _run(self, spec: ProgramSpec, source: bytes, sandbox: Sandbox) -> tuple[bool, int | None, str]:
        python = await sandbox.exec(("python3", "-c", "pass"), timeout_s=60)
        if python.exit_code != 0:
            image = sandbox.spec.image or "the default image"
            raise EvaluatorError(f"{image} has no working python3 ({tail(python)}); use another image")
        home = f"{sandbox.workdir}/check-{secrets.token_hex(8)}"
        program = assemble(spec.prefix, source.decode(errors="replace"))
        for name, text in (("run.py", _RUNNER), ("program.py", program), ("tests.py", spec.tests)):
            await sandbox.put(text.encode(), f"{home}/{name}")
        argv = ["python3", "-B", f"{home}/run.py"]
        if spec.entry_point is not None:
            argv.append(spec.entry_point)
        result = await sandbox.exec(
            argv, timeout_s=spec.timeout_s, cwd=home, output_bytes=max(self._log_bytes, 4096)
        )
        mark = await sandbox.exec(("test", "-e", f"{home}/run.passed"), timeout_s=60)
        return mark.exit_code == 0, result.exit_code, tail(result, self._log_bytes)


def assemble(prefix: str, text: str) -> str:
    """The program of an answer: its last fenced block, or all of it, behind the task's prefix.

    An answer that is indented continues the prefix; one that is not stands after it, and may define the
    same names anew.
    """
    fenced = _FENCE.findall(text)
    code = fenced[-1] if fenced else text
    if re.search(r"^from __future__ import", code, re.MULTILINE):
        return code  # must come first in its file, so it brings what it needs itself
    return f"{prefix}{code}" if code.startswith((" ", "\t")) else f"{prefix}\n\n{code}"
