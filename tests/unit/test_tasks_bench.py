"""What tells an old release from a new one is found by running both, every time alike."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import tarfile
from pathlib import Path
from typing import cast

import pytest

from hpcroll.errors import ConfigError
from hpcroll.evaluators.repository import RepositorySpec
from hpcroll.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from hpcroll.tasks.bench import Bench
from tests.directories import directory_sandbox

OLD = {"adder.py": "def add(a, b):\n    return a - b\n", "tests/test_adder.py": "def test_old():\n    pass\n"}
NEW = {**OLD, "adder.py": "def add(a, b):\n    return a + b\n"}
TESTS = """\
import pathlib
import pytest
from adder import add

def test_adds():
    assert add(2, 3) == 5

def test_nothing():
    assert add(0, 0) == 0

def test_never():
    assert False

@pytest.mark.xfail
def test_expected_to_fail():
    assert add(2, 3) == 5

def test_every_other_time():
    mark = pathlib.Path({mark!r})
    if mark.exists():
        mark.unlink()
        assert False
    mark.touch()
"""


class Directories:
    """A provider of directory sandboxes."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def start(self, spec: SandboxSpec) -> Sandbox:
        return directory_sandbox(self._root)


@pytest.fixture(autouse=True)
def _python_with_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def complete(new: dict[str, str], tests: str, root: Path) -> RepositorySpec:
    spec = RepositorySpec(
        repo=OLD,
        tests={"tests/test_adder.py": tests},
        tests_paths=("tests",),
        test_command="PYTHONPATH=. python -m pytest -q -p no:cacheprovider -c /dev/null --rootdir=. tests",
        fail_to_pass=("?",),
    )
    gold = root / "gold.tar"
    with tarfile.open(gold, "w") as tar:
        for path, text in new.items():
            info = tarfile.TarInfo(path)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    bench = Bench("sample", cast(SandboxProvider, Directories(root)), image=None, runs=2)
    return asyncio.run(bench.complete(spec, gold))


def test_only_tests_that_behave_alike_every_time_are_kept(tmp_path: Path) -> None:
    found = complete(NEW, TESTS.format(mark=str(tmp_path / "mark")), tmp_path)
    assert found.fail_to_pass == ("tests/test_adder.py::test_adds",)
    assert found.pass_to_pass == ("tests/test_adder.py::test_nothing",)
    assert found.gold_patch is not None
    assert "-    return a - b\n+    return a + b\n" in found.gold_patch


def test_pair_without_a_failing_test_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no test fails before the change .*1 pass before, 1 after"):
        complete(NEW, "def test_idle():\n    pass\n", tmp_path)


def test_pair_with_the_same_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the same in both"):
        complete(OLD, TESTS, tmp_path)
