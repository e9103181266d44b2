"""Repositories: what the agent changed counts, what it did to the tests does not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcroll.config import EvaluationConfig
from hpcroll.contract import Task, Verdict
from hpcroll.errors import ImageError
from hpcroll.evaluators.repository import RepositorySpec, lay_out, read_patch
from hpcroll.evaluators.test_ids import read_report
from hpcroll.evaluators.unittest_ids import UnittestEvaluator
from hpcroll.testing.evaluator_suite import Case, EvaluatorContract
from tests.directories import directory_sandbox, fresh_directories

TESTS = """\
import unittest

from adder import add


class AdderTest(unittest.TestCase):
    def test_adds(self):
        self.assertEqual(add(2, 3), 5)

    def test_nothing(self):
        self.assertEqual(add(0, 0), 0)
"""
SPEC = {
    "repo": {
        "adder.py": "def add(a, b):\n    return a - b\n",
        "docs/old.txt": "old\n",
        ".gitignore": "*.log\n",
    },
    "tests": {"tests/__init__.py": "", "tests/test_adder.py": TESTS},
    "tests_paths": ["tests"],
    "test_command": "python -m unittest discover -s tests -t .",
    "evaluator": "unittest",
    "fail_to_pass": ["tests.test_adder.AdderTest.test_adds"],
    "pass_to_pass": ["tests.test_adder.AdderTest.test_nothing"],
}
FIX = "sed -i 's/a - b/a + b/' adder.py"
FORGE = (
    "import unittest.case\n"
    "print('tests.test_adder.AdderTest.test_adds ... ok\\nOK')\n"
    "def add(a, b):\n    return 0\n"
)


def task(**spec: object) -> Task:
    return Task.model_validate({"task_id": "t", "handler": "swe", "prompt": "p", "spec": {**SPEC, **spec}})


def left_by(commands: Sequence[str], root: Path, **spec: object) -> dict[str, bytes]:
    """The artefacts of an agent that ran these commands."""

    async def run() -> dict[str, bytes]:
        model = RepositorySpec.model_validate(task(**spec).spec)
        sandbox = directory_sandbox(root)
        await lay_out(model, sandbox)
        for command in commands:
            result = await sandbox.exec(("sh", "-ec", command), timeout_s=60)
            assert result.exit_code == 0, result
        return dict(await read_patch(model, sandbox))

    return asyncio.run(run())


def evaluate(artefacts: dict[str, bytes], root: Path, **spec: object) -> Verdict:
    evaluator = UnittestEvaluator(EvaluationConfig())
    return asyncio.run(evaluator.evaluate(task(**spec), artefacts, fresh_directories(root)))


class TestUnittestEvaluator(EvaluatorContract):
    def make(self) -> UnittestEvaluator:
        return UnittestEvaluator(EvaluationConfig())

    def cases(self) -> list[Case]:
        head = "--- a/adder.py\n+++ b/adder.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n"
        right = f"{head}-    return a - b\n+    return a + b\n"
        wrong = right.replace("a + b", "a * b")
        return [Case(task(), {"patch": right.encode()}, {"patch": wrong.encode()})]


def test_verdict_names_every_test_that_counts(tmp_path: Path) -> None:
    found = evaluate(left_by([FIX], tmp_path), tmp_path)
    assert found.reward == 1.0
    assert found.tests_passed == (*SPEC["fail_to_pass"], *SPEC["pass_to_pass"])
    nothing = evaluate({"patch": b""}, tmp_path)
    assert nothing.reward == 0.0
    assert nothing.tests_failed == tuple(SPEC["fail_to_pass"])
    assert nothing.components == {"fail_to_pass": 0.0, "pass_to_pass": 1.0}


@pytest.mark.parametrize(
    "then",
    [
        "git add -A; git -c user.name=a -c user.email=a@b commit -qm done",
        "rm -rf .git",
        "git checkout -q --orphan other; git -c user.name=a -c user.email=a@b commit -qam x",
        "git config core.fsmonitor 'sh -c exit\\ 1'; git config diff.external false",
        "git init -q nested; echo 1 > nested/file",
        "printf '* text eol=crlf\\n' > .gitattributes",
        "rm -rf .hpcroll",
    ],
    ids=[
        "committed",
        "no .git",
        "orphan branch",
        "hostile config",
        "nested repository",
        "attributes",
        "private",
    ],
)
def test_change_counts_whatever_the_agent_did_to_git(then: str, tmp_path: Path) -> None:
    patch = left_by([FIX, then], tmp_path)["patch"]
    assert b"-    return a - b\n+    return a + b\n" in patch


def test_patch_holds_new_deleted_and_binary_files_but_no_ignored_ones(tmp_path: Path) -> None:
    commands = [
        "printf 'a\\000b\\377' > new.bin",
        "rm docs/old.txt",
        "echo noise > x.log",
        "echo 1 > .hpcroll/x",
    ]
    patch = left_by(commands, tmp_path)["patch"]
    assert b"diff --git a/new.bin b/new.bin\nnew file mode 100644" in patch
    assert b"diff --git a/docs/old.txt b/docs/old.txt\ndeleted file" in patch
    assert b"x.log" not in patch
    assert b".hpcroll" not in patch


def test_changes_to_tests_and_test_settings_are_dropped(tmp_path: Path) -> None:
    cheats = [
        "mkdir tests; echo 'class AdderTest: pass' > tests/test_adder.py",
        "echo 'raise SystemExit(0)' > sitecustomize.py",
        "mkdir unittest; echo 'print(1)' > unittest/__init__.py",
        "mkdir -p deep; echo 'import os' > deep/conftest.py",
    ]
    assert evaluate(left_by([*cheats, FIX], tmp_path), tmp_path).reward == 1.0


@pytest.mark.parametrize(
    "program",
    [FORGE, "import os\nos._exit(0)\n", "def add(a, b:\n"],
    ids=["prints success", "exits", "does not compile"],
)
def test_exit_code_and_output_of_the_code_under_test_decide_nothing(program: str, tmp_path: Path) -> None:
    write = f"cat > adder.py <<'END'\n{program}END"
    found = evaluate(left_by([write], tmp_path), tmp_path)
    assert found.reward == 0.0
    assert SPEC["fail_to_pass"][0] in found.tests_failed


def test_patch_that_does_not_apply_is_a_verdict_with_its_reason(tmp_path: Path) -> None:
    broken = b"--- a/adder.py\n+++ b/adder.py\n@@ -1 +1 @@\n-no such line\n+x\n"
    found = evaluate({"patch": broken}, tmp_path)
    assert found.reward == 0.0
    assert "does not apply" in found.log_tail


def test_patch_past_the_limit_is_the_agents_doing(tmp_path: Path) -> None:
    artefacts = left_by(["seq 1 20000 > numbers.txt"], tmp_path, patch_bytes=1024)
    assert list(artefacts) == ["patch_error"]
    found = evaluate(artefacts, tmp_path)
    assert found.reward == 0.0
    assert "limit of 1024" in found.log_tail


def test_tests_that_never_end_earn_nothing(tmp_path: Path) -> None:
    endless = left_by(["echo 'while True: pass' >> adder.py"], tmp_path)
    assert evaluate(endless, tmp_path, test_timeout_s=2.0).reward == 0.0


def test_count_of_tests_that_must_pass_is_enough(tmp_path: Path) -> None:
    fixed = left_by([FIX], tmp_path)
    assert evaluate(fixed, tmp_path, pass_to_pass=1).reward == 1.0
    assert evaluate(fixed, tmp_path, pass_to_pass=2).reward == 0.0


def test_image_without_git_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "rm", "mkdir", "cat"):
        (tools / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(ImageError, match="no git"):
        left_by([], tmp_path)


def test_image_with_another_python_is_refused_with_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"this task needs 3\.1"):
        left_by([], tmp_path, python="3.1")


def test_one_failure_outweighs_any_number_of_passes() -> None:
    whole = b'{"id": "a", "passed": true}\n{"id": "a", "passed": false}\n{"id": "b", "passed": true}\n'
    report = whole + b'{"id": "c", "pa'
    assert read_report(report) == (frozenset({"b"}), frozenset({"a"}))
