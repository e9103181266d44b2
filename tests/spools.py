"""Spools for tests: small runs, workers whose records are lines of a file, and what must hold at the end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcroll.config import RunConfig
from hpcroll.contract import RolloutRef, Task
from hpcroll.fs import RunPaths, publish
from hpcroll.spool import BeatCounts, Claim, Claims, Heartbeat, Incarnation, JobEnded, Spool, Submission

ONE_LEG: Sequence[Sequence[str]] = (("init", "run", "eval"),)
TWO_LEGS: Sequence[Sequence[str]] = (("init", "run"), ("eval",))


def make_config(
    *,
    legs: Sequence[Sequence[str]] = ONE_LEG,
    beat_s: float = 0.05,
    silence_s: float = 0.5,
    attempts: dict[str, int] | None = None,
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "legs": legs,
            "lease": {"beat_s": beat_s, "silence_s": silence_s},
            "attempts": attempts or {},
        }
    )


def make_spool(root: Path, **config: Any) -> Spool:
    return Spool.create(root, make_config(**config))


def make_tasks(count: int) -> list[Task]:
    return [Task(task_id=f"task-{n}", handler="math", prompt=f"What is {n} + 1?") for n in range(count)]


def submit(spool: Spool, tasks: int = 4, *, samples: int = 2, key: str = "epoch0") -> Submission:
    return spool.submit(make_tasks(tasks), samples=samples, key=key)


def unknown_job(info: object) -> None:
    """Nobody can say whether that worker's job ended."""


PATIENCE_S = 60.0
"""How long anything is waited for; a test that needs this long has failed."""


def wait_until(condition: Callable[[], bool], what: str, *, poll_s: float = 0.02) -> None:
    """Waits until `condition` holds; fails with `what` after `PATIENCE_S`."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"gave up waiting until {what}"
        time.sleep(poll_s)


@dataclass
class Worker:
    """One incarnation with its claims, heartbeat and record file; used from one thread."""

    spool: Spool
    incarnation: Incarnation
    claims: Claims
    heartbeat: Heartbeat

    @property
    def id(self) -> str:
        return self.incarnation.id

    @property
    def is_last_leg(self) -> bool:
        return self.incarnation.leg == self.spool.config.leg_names[-1]

    def beat(self) -> None:
        self.heartbeat.beat(BeatCounts())

    def claim(self) -> Claim:
        claim = self.claims.next()
        assert claim is not None, "there is something to start"
        return claim

    def drain(self) -> list[Claim]:
        """Claims until there is nothing to start."""
        claims = []
        while (claim := self.claims.next()) is not None:
            claims.append(claim)
        return claims

    def write_result(self, claim: Claim, *, final: bool | None = None) -> None:
        """Makes a result durable: a record in the last leg or where `final`, else a bundle."""
        if self.is_last_leg if final is None else final:
            claim.note_record()
            append_record(self.spool.paths, self.id, claim)
        else:
            publish(claim.bundle, f"{claim.rollout.ref} {claim.attempt}".encode())

    def commit(self, claim: Claim, *, final: bool | None = None) -> bool:
        self.write_result(claim, final=final)
        return claim.commit()


def start_worker(
    spool: Spool, *, leg: str | None = None, rank: int = 0, job_ended: JobEnded = unknown_job
) -> Worker:
    incarnation = Incarnation.register(spool, leg=leg or spool.config.leg_names[0], rank=rank)
    claims = Claims(spool, incarnation, job_ended=job_ended)
    return Worker(spool, incarnation, claims, Heartbeat(incarnation))


def record_file(paths: RunPaths, incarnation: str) -> Path:
    return paths.shards / f"{incarnation}.records"


def append_record(paths: RunPaths, incarnation: str, claim: Claim) -> None:
    """Appends a record to the incarnation's own file and makes it durable."""
    line = json.dumps({"rollout": str(claim.rollout.ref), "attempt": claim.attempt, "leg": claim.leg})
    descriptor = os.open(record_file(paths, incarnation), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(descriptor, line.encode() + b"\n")
    os.fsync(descriptor)
    os.close(descriptor)


def read_records(paths: RunPaths, incarnation: str) -> list[dict[str, Any]]:
    path = record_file(paths, incarnation)
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def check_exactly_one_result(spool: Spool) -> Counter[str]:
    """Asserts that every rollout has one result, of one durable record; rollouts won per incarnation."""
    won: Counter[str] = Counter()
    for segment in spool.segments():
        for ref in segment.refs():
            owner = spool.done_token(ref)
            assert owner is not None, f"rollout {ref} has no result"
            records = [r for r in read_records(spool.paths, owner) if r["rollout"] == str(ref)]
            assert len(records) == 1, f"rollout {ref}: {owner} has {len(records)} records for it"
            check_attempts(spool, ref)
            won[owner] += 1
    return won


def check_attempts(spool: Spool, ref: RolloutRef) -> None:
    """Asserts that attempts are numbered without a gap, and that each but the last has an `.end`."""
    for leg in spool.config.leg_names:
        names = {path.name for path in spool.paths.claim_directory(leg, ref).iterdir()}
        mine = {name for name in names if name.partition(".")[0] == str(ref.ordinal)}
        attempts = sorted(int(name.partition(".a")[2]) for name in mine if not name.endswith(".end"))
        assert attempts == list(range(1, len(attempts) + 1)), f"rollout {ref}: attempts {attempts}"
        for attempt in attempts[:-1]:
            assert f"{ref.ordinal}.a{attempt}.end" in mine, f"rollout {ref}: attempt {attempt} has no end"


_watchers: list[Any] = []
_NAMESPACE_EVENTS = frozenset(
    {"open", "os.link", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.scandir", "os.truncate"}
)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watchers and event in _NAMESPACE_EVENTS:
        path = str(arguments[0])
        for watcher in list(_watchers):
            watcher(event, path)


@contextmanager
def watch_operations(watcher: Any) -> Iterator[None]:
    """Calls `watcher(event, path)` before every operation on a name that this process makes."""
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked.append(True)
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


_hooked: list[bool] = []


@contextmanager
def count_operations(root: Path) -> Iterator[list[tuple[str, str]]]:
    """The operations on names below `root`, as (event, path relative to it)."""
    seen: list[tuple[str, str]] = []

    def watch(event: str, path: str) -> None:
        if path.startswith(str(root)):
            seen.append((event, path.removeprefix(f"{root}/")))

    with watch_operations(watch):
        yield seen
