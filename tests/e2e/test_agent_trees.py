"""Agent programs run from their trees, whatever the image, and any command is an agent."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcroll.api import Run
from hpcroll.config import SandboxConfig
from hpcroll.contract import FailureClass, Status, StopReason, Task, TrajectoryRecord
from hpcroll.harnesses.programs.base import MACHINE, fill
from hpcroll.harnesses.trees import catalogue, node, runtime, store
from hpcroll.sandboxes.bwrap import find_bwrap
from hpcroll.shards import verify_run
from hpcroll.testing.loop_agent import OPTIONS, PROGRAM
from hpcroll.testing.policy_server import Behaviour, Script, loops, solves
from tests.capabilities import AGENTS, IMAGES, need

SCRATCH = Path(tempfile.gettempdir())
"""Trees are unpacked there once and shared, by further runs too."""
PROMPT = "Write the word ready into the file state."
TASK = Task(
    task_id="state",
    handler="command",
    prompt=PROMPT,
    spec={"outputs": ["state"], "verify": ["sh", "-c", 'test "$(cat state)" = ready && echo 1 > reward.txt']},
)


def in_an_empty_root(tree: Path, argv: list[str]) -> subprocess.CompletedProcess[str]:
    """`argv` where there is nothing but `tree`, `/proc` and `/dev`: no C library, no shell, no user."""
    root = ["--unshare-all", "--tmpfs", "/", "--ro-bind", str(tree), "/opt/hpcroll"]
    root += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--clearenv", "--setenv", "HOME", "/tmp"]
    return subprocess.run(
        [find_bwrap(), *root, "--", *argv], capture_output=True, text=True, timeout=300, check=False
    )


def test_a_program_that_was_made_independent_needs_nothing_of_its_image(tmp_path: Path) -> None:
    need("bwrap")
    (tmp_path / "bin").mkdir()
    shutil.copy("/usr/bin/sort", tmp_path / "bin" / "sort")
    assert runtime.make_independent(tmp_path)
    shutil.copy("/usr/bin/sort", tmp_path / "bin" / "untouched")
    done = in_an_empty_root(tmp_path, ["/opt/hpcroll/bin/sort", "--version"])
    assert done.returncode == 0, done.stderr
    assert "sort" in done.stdout
    # Shown to fail where it was not: there is no C library in that root.
    assert in_an_empty_root(tmp_path, ["/opt/hpcroll/bin/untouched", "--version"]).returncode != 0


@pytest.mark.parametrize("name", ["mini_swe_agent", "pi"])
def test_a_runtime_of_an_installed_agent_starts_in_an_empty_root(name: str) -> None:
    need("bwrap")
    need("agents")
    program = catalogue.program(name)
    tree = node.unpack(store.find(AGENTS, name, program.version), SCRATCH)
    runs = {"mini_swe_agent": ["-c", "import ssl, sqlite3, litellm; print('ready')"], "pi": ["-p", "'ready'"]}
    done = in_an_empty_root(tree, [fill(program.version_argv[0], MACHINE), *runs[name]])
    assert done.stdout.strip() == "ready", done.stderr


@pytest.mark.parametrize("name", ["mini_swe_agent", "pi"])
@pytest.mark.parametrize(
    ("sandbox", "image"),
    [
        ("bwrap", "host"),
        pytest.param("apptainer", str(IMAGES / "base"), marks=pytest.mark.apptainer),
        pytest.param("apptainer", str(IMAGES / "base.sif"), marks=pytest.mark.apptainer),
    ],
    ids=["bwrap", "apptainer-directory", "apptainer-sif"],
)
def test_an_installed_agent_starts_in_a_sandbox(name: str, sandbox: str, image: str) -> None:
    need("bwrap" if sandbox == "bwrap" else "apptainer")
    need("agents")
    config = SandboxConfig(name=sandbox, image=image, scratch=SCRATCH)
    assert catalogue.program(name).version in catalogue.check(name, config, store=AGENTS)


def work(tmp_path: Path, url: str, **harness: Any) -> TrajectoryRecord:
    """The record of one rollout of `TASK` by the harness `command` in a bwrap sandbox."""
    config = {
        "model": {"endpoints": [url]},
        "sandbox": {"name": "bwrap", "scratch": str(tmp_path)},
        "harness": {"name": "hpcroll.harnesses.command:CommandHarness", "options": OPTIONS, **harness},
        "launch": {"launcher": "local", "idle_s": 0},
    }
    made = Run.create(tmp_path / "run", config=config)
    made.submit([TASK], key="state")
    made.launch(workers=1, wait=True)
    [result] = made.results("state", wait=False)
    assert verify_run(made.path).ok
    return result.trajectory().record


def serve(serve_scripts: Callable[..., str], behaviour: Behaviour) -> str:
    need("bwrap")
    return serve_scripts([Script(prompt=PROMPT, behaviours=(behaviour,))])


def test_any_command_is_an_agent(tmp_path: Path, serve_scripts: Callable[..., str]) -> None:
    record = work(tmp_path, serve(serve_scripts, solves(["printf ready > state", "false"], "done")))
    assert (record.status, record.stop_reason) == (Status.COMPLETED, StopReason.EXITED)
    assert (record.reward, record.answer) == (1.0, "done")
    assert len(record.calls) == 3
    [action] = record.actions
    assert (action.name, action.exit_code, action.call_index) == ("command", 0, None)


def test_a_command_that_is_refused_further_calls_keeps_its_work(
    tmp_path: Path, serve_scripts: Callable[..., str]
) -> None:
    record = work(tmp_path, serve(serve_scripts, loops("printf ready > state")), max_turns=3)
    assert (record.status, record.stop_reason) == (Status.TRUNCATED, StopReason.TURN_LIMIT)
    assert (record.reward, len(record.calls)) == (1.0, 3)


def test_a_command_that_breaks_fails_with_its_last_words_and_its_calls(
    tmp_path: Path, serve_scripts: Callable[..., str]
) -> None:
    url = serve(serve_scripts, solves(["printf ready > state"], "done"))
    argv = [
        "python3",
        "-c",
        PROGRAM.replace('sys.exit(print(arguments["answer"]))', "raise SystemError(name)"),
    ]
    record = work(tmp_path, url, options={**OPTIONS, "argv": argv})
    assert record.status is Status.FAILED
    assert record.failure is not None
    assert record.failure.failure_class is FailureClass.TASK
    assert "exited with 1" in record.failure.message
    assert "SystemError: submit" in record.failure.message
    assert len(record.calls) == 2
