"""A worker as a process of its own: claims, works for a moment, makes a record durable, commits.

    python -m tests.faults.spool_worker RUN LEG [--work-s S] [--stop-at POINT]

Prints its incarnation, then one line per claim (`claim ROLLOUT ATTEMPT`) and per commit (`won ROLLOUT` or
`lost ROLLOUT`). At POINT (`claimed`, `recorded` or `checked`) of its first rollout it stops itself with
SIGSTOP, as a node does that hangs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
from pathlib import Path

from hpcroll.spool import Claim, Spool
from tests.spools import Worker, start_worker

POINTS = ("claimed", "recorded", "checked")


class Program:
    """One run of the worker."""

    def __init__(self, worker: Worker, *, work_s: float, stop_at: str | None) -> None:
        self._worker = worker
        self._work_s = work_s
        self._stop_at = stop_at
        self._random = random.Random(worker.id)

    def run(self) -> None:
        threading.Thread(target=self._beat, daemon=True).start()
        while not self._worker.claims.finished() or not self._worker.spool.segments():
            claim = self._worker.claims.next()
            if claim is None:
                time.sleep(0.01)
            else:
                self._work(claim)

    def _work(self, claim: Claim) -> None:
        print("claim", claim.rollout.ref, claim.attempt, flush=True)
        self._reach("claimed")
        time.sleep(self._work_s * self._random.random())
        self._worker.write_result(claim)
        self._reach("recorded")
        if not claim.still_mine():
            print("lost", claim.rollout.ref, flush=True)
            return
        self._reach("checked")
        print("won" if claim.commit() else "lost", claim.rollout.ref, flush=True)

    def _reach(self, point: str) -> None:
        if point == self._stop_at:
            self._stop_at = None
            os.kill(os.getpid(), signal.SIGSTOP)

    def _beat(self) -> None:
        while True:
            self._worker.beat()
            time.sleep(self._worker.spool.config.lease.beat_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("leg")
    parser.add_argument("--work-s", type=float, default=0.0)
    parser.add_argument("--stop-at", choices=POINTS)
    arguments = parser.parse_args()
    worker = start_worker(Spool.open(arguments.run), leg=arguments.leg)
    print(worker.id, flush=True)
    Program(worker, work_s=arguments.work_s, stop_at=arguments.stop_at).run()


if __name__ == "__main__":
    main()
