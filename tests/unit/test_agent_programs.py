"""What programs declare, and how the black-box runner reads their ends."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpcroll.api import Run
from hpcroll.cli.main import run as run_command
from hpcroll.config import HarnessConfig
from hpcroll.contract import StopReason
from hpcroll.errors import ConfigError, HarnessError, HpcrollError, ModelError
from hpcroll.gateway import ModelEndpoint
from hpcroll.harnesses.base import AgentSession, Installed
from hpcroll.harnesses.black_box import BlackBoxHarness
from hpcroll.harnesses.command import CommandHarness
from hpcroll.harnesses.programs.base import Npm, Pip, Program, content, fill
from hpcroll.harnesses.react import ReactHarness
from hpcroll.harnesses.trees import build, catalogue, store
from hpcroll.plugins import Family, load
from hpcroll.testing.directory_sandbox import DirectorySandbox

AGENTS = (
    *(
        "claude_code",
        "cline",
        "codex",
        "continue_cli",
        "deepagents_code",
        "gemini_cli",
        "grok_cli",
        "kilo_code",
        "mini_swe_agent",
        "mistral_vibe",
        "opencode",
    ),
    *("openhands", "pi", "qwen_code"),
)
FACTS = re.findall(r"`\$\{(\w+)\}`", Program.__doc__ or "")
ENDPOINT = ModelEndpoint("http://127.0.0.1:8000/v1", "a key", "policy", context_tokens=1000, reply_tokens=100)


@dataclass
class Watch:
    """What the gateway knows of a session, as a test wants it."""

    limit: StopReason | None = None
    error: HpcrollError | None = None
    calls: list[object] = field(default_factory=lambda: [object()])


def run(
    tmp_path: Path, argv: list[str], *, watch: Watch | None = None, prompt: str = "a task", **options: Any
) -> tuple[StopReason, AgentSession]:
    """How the harness `command` ends with `argv` in a directory."""
    (tmp_path / "sandbox").mkdir(exist_ok=True)
    session = AgentSession(prompt, DirectorySandbox(tmp_path / "sandbox"), ENDPOINT, "r/0", watch)
    harness = CommandHarness(HarnessConfig(options={"argv": argv, **options}))
    return asyncio.run(harness.run(session)), session


def texts(value: Any) -> Iterator[str]:
    """Every text in a declaration."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts(item)


def test_the_agents_that_can_be_installed() -> None:
    assert tuple(catalogue.programs()) == AGENTS


@pytest.mark.parametrize("name", AGENTS)
def test_a_program_is_pinned_starts_from_its_tree_and_names_facts_that_there_are(name: str) -> None:
    program = catalogue.program(name)
    assert re.fullmatch(r"\d+\.\d+\.\d+", program.version)
    assert program.argv[0].startswith("/opt/hpcroll/")
    assert program.version_argv[0] == program.argv[0]
    assert program.task_on_stdin != any("${task}" in word for word in program.argv)
    told = " ".join(texts([program.argv, dict(program.env), dict(program.files)]))
    assert "${base_url}" in told or "${root_url}" in told
    assert set(re.findall(r"\$\{(\w+)\}", told)) <= set(FACTS)


def test_facts_that_the_documentation_names_are_filled_in(tmp_path: Path) -> None:
    words = [f"{name}=${{{name}}}" for name in FACTS]
    _, session = run(tmp_path, ["printf", "%s\\n", *words])
    told = dict(line.split("=", 1) for line in (session.answer or "").splitlines())
    assert not [value for value in told.values() if value.startswith("$")]
    assert told["base_url"] == "http://127.0.0.1:8000/v1"
    assert told["root_url"] == "http://127.0.0.1:8000"
    assert told["home"] == told["workdir"] == str(tmp_path / "sandbox")
    assert (told["context_tokens"], told["reply_tokens"], told["prompt_tokens"]) == ("1000", "100", "900")


@pytest.mark.parametrize("name", AGENTS)
def test_a_lock_pins_exact_versions_for_the_program_s_own_version_alone(name: str) -> None:
    program = catalogue.program(name)
    lock = build.lock(program, program.version)
    assert build.lock(program, "0.0.0") is None
    if isinstance(program.install, Pip):
        assert lock is not None
        pins = [line for line in lock.splitlines() if not line.startswith("#")]
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==\S+", pin) for pin in pins)
        assert {wanted.replace("${version}", program.version) for wanted in program.install.requirements} <= {
            *pins
        }
    if isinstance(program.install, Npm) and lock is not None:
        packages = json.loads(lock)["packages"]
        assert packages[""]["dependencies"] == fill(program.install.packages, {"version": program.version})
        assert all("integrity" in entry for path, entry in packages.items() if path)
        assert not any("resolved" in entry for entry in packages.values())


def test_a_text_that_is_one_fact_alone_keeps_its_type() -> None:
    facts = {"n": 7, "share": 0.5, "task": "${n} costs $5"}
    assert fill({"${n}": ["${n}", "${share}", "n=${n}", "$5", "${task}", True]}, facts) == {
        "7": [7, 0.5, "n=7", "$5", "${n} costs $5", True]
    }
    assert json.loads(content({"limit": "${n}"}, facts)) == {"limit": 7}
    assert content("limit = ${n}\n", facts) == b"limit = 7\n"


@pytest.mark.parametrize("on_stdin", [True, False])
def test_a_task_reaches_the_program_as_it_is(tmp_path: Path, on_stdin: bool) -> None:
    prompt = '--help ${home} $HOME "quoted" \\n `id` ünïcode\nsecond line'
    argv = ["cat"] if on_stdin else ["printf", "%s", "${task}"]
    _, session = run(tmp_path, argv, prompt=prompt, task_on_stdin=on_stdin)
    assert session.answer == prompt


def test_variables_and_files_name_the_model(tmp_path: Path) -> None:
    script = 'printf "%s " "$OPENAI_BASE_URL" "$MY_KEY" "$OPENAI_MODEL" "$MORE"; cat ~/.agent/config.json'
    files = {"~/.agent/config.json": {"window": "${context_tokens}"}}
    _, session = run(
        tmp_path, ["sh", "-c", script], api_key_env="MY_KEY", env={"MORE": "${max_turns}"}, files=files
    )
    assert session.answer == 'http://127.0.0.1:8000/v1 a key policy 40 {\n  "window": 1000\n}'
    assert (tmp_path / "sandbox" / ".agent" / "config.json").stat().st_mode & 0o077 == 0


def test_an_exit_with_a_code_of_success_is_exited_and_an_action(tmp_path: Path) -> None:
    reason, session = run(tmp_path, ["sh", "-c", "echo 42; exit 3"], watch=Watch(), success=[0, 3])
    assert reason is StopReason.EXITED
    assert session.answer == "42"
    [action] = session.actions
    assert (action.name, action.call_index, action.exit_code) == ("command", None, 3)
    assert action.output_bytes == 3


def test_another_exit_code_is_a_harness_error_with_the_last_words(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"command 1 exited with 3: half done \| no such option"):
        run(tmp_path, ["sh", "-c", "echo half done; echo no such option >&2; exit 3"], watch=Watch())


def test_an_agent_that_never_called_its_model_is_broken_whatever_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="exited with 0 without a model call: bye"):
        run(tmp_path, ["echo", "bye"], watch=Watch(calls=[]))


@pytest.mark.parametrize("code", [0, 1])
def test_what_the_gateway_refused_says_how_it_ended_whatever_the_exit_code(tmp_path: Path, code: int) -> None:
    argv = ["sh", "-c", f"echo part; exit {code}"]
    reason, session = run(tmp_path, argv, watch=Watch(limit=StopReason.CONTEXT_LIMIT))
    assert reason is StopReason.CONTEXT_LIMIT
    assert session.answer == "part"
    with pytest.raises(ModelError, match="no server"):
        run(tmp_path, argv, watch=Watch(error=ModelError("no server")))


def test_an_agent_that_goes_on_after_a_limit_is_stopped_after_its_grace(tmp_path: Path) -> None:
    reason, session = run(tmp_path, ["sleep", "3600"], watch=Watch(limit=StopReason.TOKEN_LIMIT), grace_s=0)
    assert reason is StopReason.TOKEN_LIMIT
    [action] = session.actions
    assert action.timed_out
    assert action.exit_code is None


def test_an_agent_that_ran_out_of_context_may_go_on(tmp_path: Path) -> None:
    argv = ["sh", "-c", "sleep 1.5; echo done"]
    reason, session = run(tmp_path, argv, watch=Watch(limit=StopReason.CONTEXT_LIMIT), grace_s=0)
    assert reason is StopReason.CONTEXT_LIMIT
    assert session.answer == "done"


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_that_is_not_installed_is_refused_with_the_command_that_does(
    tmp_path: Path, name: str
) -> None:
    options: dict[str, Any] = {"store": str(tmp_path)}
    harness = load(Family.HARNESS, name)(HarnessConfig(name=name, options=options))
    assert isinstance(harness, Installed)
    with pytest.raises(ConfigError, match=f"hpcroll agents install {name} --store {tmp_path}"):
        harness.check()
    (tmp_path / f"{name}-{harness.version}-{'0' * 16}.tar.zst").touch()
    harness.check()


def test_a_harness_without_a_program_of_its_own_needs_no_installation(tmp_path: Path) -> None:
    assert not isinstance(ReactHarness(HarnessConfig()), Installed)
    harness = CommandHarness(HarnessConfig(options={"argv": ["true"]}))
    harness.check()
    assert harness.mounts(tmp_path) == ()


def test_another_version_of_an_agent_is_looked_for_by_that_version(tmp_path: Path) -> None:
    options: dict[str, Any] = {"store": str(tmp_path), "version": "9.9.9"}
    harness: BlackBoxHarness = load(Family.HARNESS, "pi")(HarnessConfig(options=options))
    assert harness.version == "9.9.9"
    with pytest.raises(ConfigError, match=r"agent pi 9\.9\.9 is not installed"):
        harness.check()


def test_launch_is_refused_before_anything_is_submitted(tmp_path: Path) -> None:
    harness = {"name": "pi", "options": {"store": str(tmp_path / "store")}}
    config = {"harness": harness, "sandbox": {"name": "bwrap"}, "launch": {"launcher": "local"}}
    made = Run.create(tmp_path / "run", config=config)
    with pytest.raises(ConfigError, match="hpcroll agents install pi"):
        made.launch(workers=1)
    assert made.job_states() == []


def test_agents_are_listed_with_what_is_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    version = catalogue.program("pi").version
    (tmp_path / f"pi-{version}-{'0' * 16}.tar.zst").write_bytes(b"12345")
    assert run_command(["agents", "list", "--store", str(tmp_path), "--json"]) == 0
    rows = {row["agent"]: row for row in json.loads(capsys.readouterr().out)}
    assert tuple(rows) == AGENTS
    assert (rows["pi"]["installed"], rows["pi"]["size_bytes"]) == (version, 5)
    assert rows["codex"]["installed"] is None


def test_an_installed_agent_is_not_installed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / f"pi-{catalogue.program('pi').version}-{'0' * 16}.tar.zst"
    archive.touch()
    assert run_command(["agents", "install", "pi", "--store", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(archive)
    assert [found.path for found in store.listing(tmp_path)] == [archive]


def test_an_unknown_agent_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["agents", "install", "react"]) == 2
    assert ", ".join(AGENTS) in capsys.readouterr().err
