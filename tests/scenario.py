"""A run of sleeping rollouts on real workers, watched and disturbed from outside.

Each rollout sleeps for a known time in each stage, inside its sandbox; a marker in the command line of
every payload tells whether anything of the run is still alive.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcroll.api import Run
from hpcroll.contract import EndReason, Stage, Status, Task
from hpcroll.fs import RunPaths
from hpcroll.launch import JobHandle
from hpcroll.shards import verify_run
from hpcroll.spool import Event, WorkerInfo, read_end, read_events, read_worker
from hpcroll.testing.policy_server import Script, solves

WAIT_S = 300.0


@dataclass(frozen=True)
class Sleeps:
    """Seconds in each stage; the set-up is repeated before the verifier."""

    init: float = 1.0
    run: float = 2.0
    verify: float = 1.0


class Scenario:
    """One run, its marker, and what can be done to it and said of it."""

    def __init__(
        self,
        root: Path,
        serve: Callable[[Sequence[Script]], str],
        *,
        rollouts: int,
        config: dict[str, Any],
        sleeps: Sleeps,
        samples: int = 1,
        prints_bytes: int = 0,
    ) -> None:
        """`rollouts` in groups of `samples`; each agent prints `prints_bytes` random bytes, as base64."""
        self.marker = f"hpcroll-{secrets.token_hex(8)}"
        tasks, scripts = self._tasks(rollouts // samples, sleeps, prints_bytes)
        url = serve(scripts)
        self.run = Run.create(
            root, config={**config, "model": {**config.get("model", {}), "endpoints": [url]}}
        )
        self.paths = RunPaths(self.run.path)
        self.handles: Sequence[JobHandle] = ()
        self.rollouts = rollouts
        self.run.submit(tasks, samples=samples, key="scenario")

    def launch(self, *, workers: int) -> None:
        """Starts `workers` workers for each leg."""
        self.handles = self.run.launch(workers=workers)

    def wait_for(self, what: str, condition: Callable[[], Any], *, timeout_s: float = WAIT_S) -> Any:
        """The first true value of `condition`; fails with the run's state where there is none in time."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"no {what} after {timeout_s:g} s; {self.state()}"
            time.sleep(0.1)
        return value

    def in_stage(
        self, stage: Stage, *, on: Callable[[WorkerInfo], bool] = lambda _: True
    ) -> WorkerInfo | None:
        """A worker that holds a rollout in `stage` now, among those that `on` accepts."""
        inside: dict[tuple[str, str], str] = {}
        for event in self.events():
            key = (event.incarnation, event.fields.get("rollout", ""))
            if event.event == f"{stage}.start":
                inside[key] = event.incarnation
            elif event.event == f"{stage}.end":
                inside.pop(key, None)
        for incarnation in inside.values():
            info = self.worker(incarnation)
            if info is not None and on(info) and Path(f"/proc/{info.pid}").exists():
                return info
        return None

    def events(self) -> list[Event]:
        return list(read_events(self.paths))

    def worker(self, incarnation: str) -> WorkerInfo | None:
        return read_worker(self.paths.worker_file(incarnation))

    def committed(self) -> int:
        return sum(1 for _ in self.run.results("scenario", wait=False))

    def wait_for_all(self, *, timeout_s: float = WAIT_S) -> None:
        done = self.wait_for(
            "end of all rollouts", lambda: self.committed() == self.rollouts, timeout_s=timeout_s
        )
        assert done

    def ends(self) -> Counter[EndReason]:
        """Why attempts ended without a result, over all rollouts and legs."""
        found = [read_end(path) for path in self.paths.claims.rglob("*.end")]
        return Counter(end.failure.reason for end in found if end is not None)

    def assert_each_rollout_ended_once_and_well(self) -> None:
        results = list(self.run.results("scenario", wait=False))
        assert len({result.rollout_id for result in results}) == len(results) == self.rollouts
        assert {result.status for result in results} == {Status.COMPLETED}, self.state()
        assert {result.reward for result in results} == {1.0}
        report = verify_run(self.run.path)
        assert report.ok, report

    def assert_nothing_survives(self) -> None:
        """No payload of the run lives any more, once its workers have ended."""
        self.wait_for("end of every payload", lambda: not self.payloads(), timeout_s=120)

    def payloads(self) -> list[int]:
        """Processes, anywhere on this machine, whose command line holds the marker."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                try:
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if self.marker.encode() in command:
                    found.append(int(entry.name))
        return found

    def kill(self, worker: WorkerInfo, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(worker.pid, number)

    def state(self) -> str:
        tail = [f"{event.incarnation} {event.event} {event.fields}" for event in self.events()[-30:]]
        logs = [
            f"--- {path}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            for path in sorted(self.paths.logs.rglob("*"))
            if path.is_file() and path.stat().st_size and path.suffix in {".out", ".err", ".log"}
        ]
        return "\n".join(["the run's last events:", *tail, "its logs:", *logs])

    def _tasks(self, count: int, sleeps: Sleeps, prints_bytes: int) -> tuple[list[Task], list[Script]]:
        def sleep(seconds: float) -> str:
            return f": {self.marker}; sleep {seconds:g}; true"

        tasks, scripts = [], []
        for index in range(count):
            prompt = f"Scenario {self.marker}, rollout number {index:03d}."
            spec = {
                "setup": ["sh", "-c", sleep(sleeps.init)],
                "verify": ["sh", "-c", f"{sleep(sleeps.verify)} && cp answer.txt reward.txt"],
            }
            tasks.append(Task(task_id=f"sleep-{index}", handler="command", prompt=prompt, spec=spec))
            commands = [f"{sleep(sleeps.run)} && echo 1 > answer.txt"]
            if prints_bytes:
                commands.append(f"head -c {prints_bytes} /dev/urandom | base64 -w 0")
            scripts.append(Script(prompt=prompt, behaviours=(solves(commands, "done"),)))
        return tasks, scripts
