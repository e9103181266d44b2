"""A set of trajectories captured from real agent programs, in groups of 8.

    python -m tests.benchmarks.shards_capture FOLDER [--agents NAME...] [--groups N]

Unmodified agents work in network-less sandboxes on repositories made of Python's own library, against the
scripted policy server with a real vocabulary. System prompts, tools, how output is cut and numbered, and
what a history looks like are the agents' own. What the policy says and which files it looks at is scripted,
seeded, and different in every rollout; its log-probabilities are drawn. FOLDER/AGENT are the run directories.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcroll.api import Run
from hpcroll.contract import Task, Trajectory
from hpcroll.shards import open_run
from hpcroll.testing.policy_server import Behaviour, Script, Turn
from hpcroll.testing.policy_server.script import ToolCall, write_scripts
from tests.agents import AGENTS, LAST_WORDS, Agent
from tests.benchmarks.shards_corpus import corpus
from tests.benchmarks.shards_repository import Repository
from tests.capabilities import AGENTS as AGENT_PROGRAMS
from tests.capabilities import IMAGES

DEFAULT_AGENTS = ("pi", "mini_swe_agent", "codex", "opencode")
GROUP_SIZE = 8
SEED = 1
_BEHAVIOURS = 24
"""A rollout is given one of them by its id; siblings seldom share one."""
_REPOSITORIES = (
    ("json", ("decoder.py", "encoder.py", "scanner.py", "tool.py", "__init__.py")),
    ("email", ("message.py", "header.py", "charset.py", "utils.py", "generator.py", "feedparser.py")),
    ("asyncio", ("events.py", "futures.py", "locks.py", "queues.py", "streams.py", "tasks.py")),
    ("logging", ("__init__.py", "config.py", "handlers.py")),
    ("http", ("client.py", "cookies.py", "cookiejar.py", "server.py")),
    ("unittest", ("case.py", "loader.py", "main.py", "result.py", "suite.py", "util.py")),
)
_TEST = "import unittest\n\n\nclass SourceTest(unittest.TestCase):\n{cases}"
_CASE = """\
    def test_{name}_compiles(self):
        with open({path!r}) as file:
            compile(file.read(), {path!r}, "exec")

"""


def capture(folder: Path, *, agents: Sequence[str] = DEFAULT_AGENTS, groups: int = 2) -> list[Path]:
    """Runs `groups` groups of 8 rollouts of each agent; returns the run directories, those there kept."""
    return [_capture_agent(folder / name, AGENTS[name], groups) for name in agents]


def captured(folder: Path) -> Iterator[Trajectory]:
    """The trajectories of every run in `folder`, group by group."""
    for path in sorted(path for path in folder.iterdir() if (path / "run.json").exists()):
        for group in open_run(path).groups("any"):
            for stored in sorted(group.members, key=lambda one: one.ref.ordinal):
                yield stored.trajectory()


def _capture_agent(path: Path, agent: Agent, groups: int) -> Path:
    done = path / "captured"
    if done.exists():
        return path
    tasks = [_Imagined(agent, number) for number in range(groups)]
    with _policy([task.script() for task in tasks], path.with_suffix(".policy")) as url:
        run = Run.create(path, config=_config(agent, url))
        run.submit([task.task() for task in tasks], samples=GROUP_SIZE, key=f"captured-{agent.name}")
        run.launch(workers=1, wait=True)
    done.touch()
    return path


def _config(agent: Agent, url: str) -> dict[str, Any]:
    scratch = os.environ.get("TMPDIR", "/tmp")
    return {
        "model": {"endpoints": [url], "context_tokens": 200_000, "mode": "chat"},
        "sandbox": {"name": "apptainer", "image": str(IMAGES / "base"), "scratch": scratch},
        "harness": {"name": agent.name, "options": {"store": str(AGENT_PROGRAMS)}, "max_turns": 100},
        "stages": {"run": {"width": 3, "timeout_s": 900}},
        "launch": {"launcher": "local", "idle_s": 0},
    }


class _Imagined:
    """A task over some files of Python's library, and what the policy does about it."""

    def __init__(self, agent: Agent, number: int) -> None:
        self._agent = agent
        self._name = f"{agent.name}-{number}"
        self._rng = random.Random(f"captured {SEED} {self._name}")
        package, names = _REPOSITORIES[self._rng.randrange(len(_REPOSITORIES))]
        root = Path(sysconfig.get_path("stdlib")) / package
        sources = {f"source/{name}": root / name for name in names if (root / name).exists()}
        self._files = {path: file.read_text(encoding="utf-8") for path, file in sources.items()}
        self._words = Repository(corpus(), f"words {self._name}")
        self._prompt = f"Task {self._name}. " + self._said(self._rng, 250)

    def task(self) -> Task:
        names = [path.split("/")[1].removesuffix(".py").strip("_") for path in self._files]
        cases = [_CASE.format(name=name, path=path) for name, path in zip(names, self._files, strict=True)]
        tests = {"test_source.py": _TEST.format(cases="".join(cases))}
        return Task(
            task_id=self._name,
            handler="swe",
            prompt=self._prompt,
            spec={
                "repo": {**self._files, **tests},
                "tests": tests,
                "tests_paths": ["test_source.py"],
                "test_command": "python -m unittest -v test_source",
                "test_timeout_s": 60,
                "evaluator": "unittest",
                "fail_to_pass": [f"test_source.SourceTest.test_{name}_compiles" for name in names],
            },
        )

    def script(self) -> Script:
        behaviours = [self._behaviour(number) for number in range(_BEHAVIOURS)]
        return Script(prompt=self._prompt[:40], behaviours=tuple(behaviours))

    def _behaviour(self, number: int) -> Behaviour:
        rng = random.Random(f"behaviour {SEED} {self._name} {number}")
        turns = []
        for _ in range(rng.randint(8, 32)):
            size = max(10, int(120 * rng.lognormvariate(0, 0.7)))
            turns.append(Turn(text=self._said(rng, size), tools=(self._move(rng),), noncanonical=0))
        done = () if self._agent.done is None else (self._agent.done,)
        turns.append(Turn(text=LAST_WORDS, tools=done, noncanonical=0))
        return Behaviour(name=f"{self._name}-{number}", turns=tuple(turns), count="requests")

    def _move(self, rng: random.Random) -> ToolCall:
        agent, paths = self._agent, list(self._files)
        path = paths[min(int(rng.paretovariate(0.8)) - 1, len(paths) - 1)]
        lines = self._files[path].splitlines(keepends=True)
        start = 40 * min(int(rng.paretovariate(0.6)) - 1, len(lines) // 40)
        kind = rng.choices(("view", "read", "search", "test", "edit"), (40, 4, 18, 18, 20))[0]
        if kind == "read":
            return agent.read(path)
        if kind == "search":
            words = [word for word in lines[min(start, len(lines) - 1)].split() if word.isalpha()]
            return agent.run(
                f"grep -rn '{rng.choice(words or ['self'])}' . | head -{rng.choice((20, 40, 80))}"
            )
        if kind == "test":
            return agent.run("python3 -m unittest -v test_source")
        if kind == "edit":
            first = rng.randrange(len(lines))
            old = "".join(lines[first : first + rng.randint(1, 6)])
            return agent.replace(path, old, f"{old.rstrip()}  # {self._said(rng, 12)}\n")
        return agent.run(f"cat -n {path} | sed -n '{start + 1},{start + rng.choice((40, 80, 120))}p'")

    def _said(self, rng: random.Random, size: int) -> str:
        text = self._words.text(self._words.prose(rng, size))
        return " ".join(text.replace('"""', "").split())


@contextmanager
def _policy(scripts: Sequence[Script], folder: Path) -> Iterator[str]:
    """The base URL of a scripted policy server, a process of its own."""
    folder.mkdir(parents=True)
    write_scripts(scripts, folder / "scripts.jsonl")
    port_file = folder / "port"
    argv = [sys.executable, "-m", "hpcroll.testing.policy_server", "--seed", str(SEED), "--remember"]
    argv += ["--scripts", str(folder / "scripts.jsonl"), "--port-file", str(port_file)]
    argv += ["--context-tokens", "200000"]
    with (folder / "log").open("wb") as output:
        server = subprocess.Popen(argv, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 120
        while not (port_file.exists() and port_file.read_text().strip()):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"no policy server: {(folder / 'log').read_text()}")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--agents", nargs="+", choices=tuple(AGENTS), default=DEFAULT_AGENTS)
    parser.add_argument("--groups", type=int, default=2, help="of each agent (default 2)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for path in capture(options.folder, agents=options.agents, groups=options.groups):
        print(path)


if __name__ == "__main__":
    main()
