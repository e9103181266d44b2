"""A gateway as a worker runs it, in a process of its own: journal, registry, a session for each client.

    python -m tests.benchmarks.gateway_process UPSTREAM FOLDER SESSIONS

Prints one line of JSON, `{"base_url": ..., "keys": [...]}`, and serves until SIGTERM; then prints the waits
for the journal, `[[ended_at, seconds], ...]` on the monotonic clock.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
import time
from concurrent.futures import Future
from pathlib import Path

from hpcroll.config import ModelConfig
from hpcroll.contract import RecordedCall, Rollout, RolloutRef, Task
from hpcroll.fs import RunPaths, make_directories
from hpcroll.gateway import Gateway, Journal
from hpcroll.gateway.admission import Admission
from hpcroll.gateway.attribution import PolicySource
from hpcroll.policy import PolicyRegistry
from hpcroll.worker.policy_view import PolicyView
from tests.benchmarks.gateway_conversation import MODEL

_SEGMENT = "0" * 16


class TimedJournal(Journal):
    """A journal that notes how long each call waited until it was durable."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.waits: list[tuple[float, float]] = []

    def submit(self, recorded: RecordedCall) -> Future[None]:
        started_s = time.perf_counter()
        written = super().submit(recorded)
        written.add_done_callback(lambda _: self._note(started_s))
        return written

    def _note(self, started_s: float) -> None:
        ended_s = time.perf_counter()
        self.waits.append((ended_s, ended_s - started_s))


def _rollout(ordinal: int) -> Rollout:
    task = Task(task_id="bench", handler="command", prompt="Work.")
    ref = RolloutRef(segment=_SEGMENT, ordinal=ordinal)
    return Rollout(ref=ref, task=task, sample_index=0, group_size=1)


def journal_file(folder: Path) -> Path:
    """Where the gateway that serves in `folder` keeps its journal."""
    return RunPaths(folder).journal_file("bench")


async def serve(upstream: str, folder: Path, sessions: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    config = ModelConfig(name=MODEL, endpoints=(upstream,), rollout_tokens=1 << 40)
    paths = RunPaths(folder)
    make_directories(list(paths.directories()))
    PolicyRegistry(paths, name=MODEL).publish(7, weights=None)
    journal = TimedJournal(journal_file(folder))
    journal.open()
    admission = Admission()
    async with PolicyView(paths, MODEL, admission=admission) as view:
        # The upstream does not name its version: the registry is read anew at the end of every call.
        policy = PolicySource(known=view.policy, read=view.policy_now, history=view.history)
        gateway = Gateway(config, journal=journal, policy=policy, admission=admission)
        await gateway.start()
        endpoints = [gateway.open_session(_rollout(ordinal), 1).outside for ordinal in range(sessions)]
        ready = {"base_url": endpoints[0].base_url, "keys": [endpoint.api_key for endpoint in endpoints]}
        gc.collect()
        gc.freeze()
        print(json.dumps(ready), flush=True)
        await stop.wait()
        await gateway.close()
    await journal.close()
    print(json.dumps(journal.waits), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
