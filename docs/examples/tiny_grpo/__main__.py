"""Runs the whole loop on this machine, and kills its parts on the way.

    python -m tiny_grpo ROOT                 # learns
    python -m tiny_grpo ROOT --control       # the same with shuffled rewards: must not learn

Prints a row per step; the last line is `reward_first_fifth=... reward_last_fifth=... reward_gain=...`, of
rewards on held-out prompts. Exits with 1 where a group was lost or trained on twice.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from hpcroll import Run, open_run
from hpcroll.errors import HpcrollError
from tiny_grpo.evaluation import HeldOut
from tiny_grpo.layout import Layout, Settings
from tiny_grpo.model import CONTEXT, save_weights
from tiny_grpo.processes import LoopError, Program, answers, kill_workers, wait_until
from tiny_grpo.report import Row, audit, gain, header, make_row
from tiny_grpo.task import make_tasks
from tiny_grpo.warm_start import warm_start

_LOOK_S = 0.5
_QUIET_S = 300.0
"""Longest that nothing may happen before the loop gives up."""
_KILLS = {0.2: "trainer", 0.4: "server and workers", 0.6: "trainer", 0.8: "server and workers"}
"""What is killed after which share of the steps."""


class Loop:
    """One loop in one directory; stopped before its end, it goes on when it is started there again."""

    def __init__(self, layout: Layout, settings: Settings, *, seed: int, control: bool) -> None:
        self._layout, self._settings, self._seed = layout, settings, seed
        self._rows: list[Row] = []
        layout.make()
        self._warm_start()
        self._run, self._held_out = self._open_runs()
        self._url = self._run.config.model.endpoints[0]
        self._evaluation = HeldOut(self._held_out, settings, seed=seed)
        port = str(urlsplit(self._url).port)
        self._server = Program(layout, "server", str(layout.run), "--port", port)
        flags = ["--steps", str(settings.steps), "--seed", str(seed), *(["--control"] if control else [])]
        self._trainer = Program(layout, "trainer", str(layout.root), *flags)

    def run(self) -> list[Row]:
        """Runs all steps and returns their rows; raises `LoopError` where a part fails or nothing moves."""
        tasks = make_tasks(self._submitted, held_out=False, seed=self._seed)
        self._run.submit(tasks, samples=self._settings.samples, key="train")
        with ExitStack() as stack:
            stack.enter_context(self._server)
            wait_until(lambda: answers(self._url), "the start of the server")
            for run in (self._run, self._held_out):
                stack.callback(run.drain)
                run.launch(workers=1)
            stack.enter_context(self._trainer)
            self._watch()
        for run in (self._run, self._held_out):
            run.close()
            wait_until(partial(_is_left, run), "the end of the workers")
        return self._rows

    @property
    def _submitted(self) -> int:
        # What workers may have begun when the trainer is through is more than what it trained on.
        return (self._settings.steps + self._settings.versions_ahead + 1) * self._settings.groups_per_step

    def _watch(self) -> None:
        """Until the last step has its row: kills what is due, has new versions evaluated, prints rows."""
        print(header(), flush=True)
        kills = {max(round(share * self._settings.steps), 1): what for share, what in _KILLS.items()}
        kills = {step: what for step, what in kills.items() if not self._layout.step(step).exists()}
        seen, evaluated, moved_at = 0, 0, time.monotonic()
        while len(self._rows) < self._settings.steps:
            self._server.ended()
            done = self._trainer.ended()
            if self._layout.step(seen + 1).exists():
                seen, moved_at = seen + 1, time.monotonic()
                if (what := kills.pop(seen, None)) is not None and not done:
                    self._kill(what, seen)
            latest = self._run.policy.latest()
            while latest is not None and evaluated < latest.version:
                evaluated += 1
                self._evaluation.submit(evaluated, self._layout.weights(evaluated))
            self._print_rows()
            if time.monotonic() - moved_at > _QUIET_S:
                raise LoopError(
                    f"nothing happened for {_QUIET_S:g} s after step {seen}; see {self._layout.root}"
                )
            time.sleep(_LOOK_S)

    def _kill(self, what: str, step: int) -> None:
        if what == "trainer":
            self._trainer.kill()
            self._trainer.start()
        else:
            self._server.kill()
            kill_workers(self._run)
            self._server.start()
        print(f"-- SIGKILL to the {what} at step {step}, and started again", flush=True)

    def _print_rows(self) -> None:
        """The rows of those steps whose version has been evaluated."""
        while (path := self._layout.step(len(self._rows) + 1)).exists():
            held_out = self._evaluation.reward(len(self._rows) + 1)
            if held_out is None:
                return
            before = self._rows[-1] if self._rows else None
            said = json.loads(path.read_text())
            self._rows.append(make_row(said, before, submitted=self._submitted, held_out=held_out))
            print(self._rows[-1], flush=True)

    def _warm_start(self) -> None:
        if self._layout.weights(0).exists():
            return
        start = time.monotonic()
        policy = warm_start(seed=self._seed)
        save_weights(policy, self._layout.weights(0))
        print(f"warm start: {time.monotonic() - start:.0f} s", flush=True)

    def _open_runs(self) -> tuple[Run, Run]:
        """The two runs, created where they are not there; they share one server."""
        if self._layout.held_out.exists():
            return Run.open(self._layout.run), Run.open(self._layout.held_out)
        url = f"http://127.0.0.1:{_free_port()}"
        run = Run.create(self._layout.run, _config(url, seeds="derived"))
        # Without seeds the server's own count: then versions differ by what they are, not by chance.
        held_out = Run.create(self._layout.held_out, _config(url, seeds="random"))
        for each in (run, held_out):
            each.policy.publish(0, weights=str(self._layout.weights(0)))
        # Before workers start: they would run ahead of a trainer that is still starting.
        run.policy.window(
            groups=(self._settings.versions_ahead + 1) * self._settings.groups_per_step,
            versions=self._settings.versions_ahead,
            groups_per_version=self._settings.groups_per_step,
        )
        return run, held_out


def _config(url: str, *, seeds: str) -> dict[str, Any]:
    """A run's config: two turns in a sandbox without network, sampled from the model's own distribution."""
    return {
        "model": {
            "endpoints": [url],
            "context_tokens": CONTEXT,
            "sampling": {"max_tokens": 16},
            "seeds": seeds,
            "call_tries": 20,
        },
        "harness": {"name": "react", "max_turns": 2, "command_timeout_s": 10},
        "sandbox": {"name": "bwrap", "image": "host"},
        "stages": {"run": {"width": 8, "timeout_s": 120}},
        "lease": {"beat_s": 1, "silence_s": 30},
        "launch": {"launcher": "local", "idle_s": 3600},
    }


def _is_left(run: Run) -> bool:
    return run.status().workers_alive == 0


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--steps", type=int, default=Settings().steps)
    parser.add_argument("--held-out", type=int, default=Settings().held_out_prompts, help="prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="shuffle the rewards within each group")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    layout = Layout(options.root.absolute())
    settings = Settings(steps=options.steps, held_out_prompts=options.held_out)
    loop = Loop(layout, settings, seed=options.seed, control=options.control)
    try:
        rows = loop.run()
    except (LoopError, HpcrollError) as error:
        print(f"tiny_grpo: {error}", file=sys.stderr)
        return 1
    problems = audit(layout, settings, Run.open(layout.run), rows)
    rollouts = sum(1 for folder in (layout.run, layout.held_out) for _ in open_run(folder, columns=()))
    elapsed_s = time.monotonic() - start
    print(f"{rollouts} rollouts in {elapsed_s:.0f} s; groups lost or repeated: {len(problems)}")
    for problem in problems:
        print(problem, file=sys.stderr)
    first, last = gain(rows)
    print(f"reward_first_fifth={first:.3f} reward_last_fifth={last:.3f} reward_gain={last - first:.3f}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
