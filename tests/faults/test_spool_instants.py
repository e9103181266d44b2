"""SIGKILL before every single operation on a name, one after the other: never a lost or a second result."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from hpcroll.fs import list_names
from hpcroll.spool import Spool, mark_ended
from tests.spools import (
    ONE_LEG,
    TWO_LEGS,
    check_exactly_one_result,
    make_spool,
    make_tasks,
    start_worker,
    watch_operations,
)


def work_through(spool: Spool) -> None:
    """Does both rollouts in every leg; the first one ends for good in the first leg."""
    for leg in spool.config.leg_names:
        worker = start_worker(spool, leg=leg)
        worker.beat()
        while not worker.claims.finished():
            claim = worker.claims.next()
            if claim is None:
                continue
            ends_here = claim.rollout.ref.ordinal == 0 or worker.is_last_leg
            worker.write_result(claim, final=ends_here)
            if claim.still_mine():
                claim.commit()


def killed_before(operation: int, root: Path, work: Callable[[], object]) -> bool:
    """Works in a child that SIGKILL takes before its `operation`-th operation; False: it came to its end."""
    pid = os.fork()
    if pid == 0:
        count = itertools.count(1)

        def watch(event: str, path: str) -> None:
            if path.startswith(str(root)) and next(count) == operation:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            with watch_operations(watch):
                work()
            os._exit(0)
        finally:
            os._exit(99)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def bury(spool: Spool) -> None:
    """Does what the parent of a rank does once its worker is dead."""
    for name in list_names(spool.paths.workers):
        if name.endswith(".json"):
            mark_ended(spool.paths, name.removesuffix(".json"), status=-9)


@pytest.mark.parametrize("legs", [ONE_LEG, TWO_LEGS], ids=["one leg", "two legs"])
def test_killed_before_any_operation(tmp_path: Path, legs: Sequence[Sequence[str]]) -> None:
    for operation in itertools.count(1):
        spool = make_spool(tmp_path / f"run{operation}", legs=legs)
        spool.submit(make_tasks(2), samples=1, key="k")
        killed = killed_before(operation, spool.paths.root, partial(work_through, spool))
        bury(spool)
        work_through(spool)
        check_exactly_one_result(spool)
        if not killed:
            break
    assert operation > 20, "each of them an instant to die at"


def test_submitter_killed_before_any_operation_leaves_all_or_nothing(tmp_path: Path) -> None:
    tasks = make_tasks(3)
    for operation in itertools.count(1):
        spool = make_spool(tmp_path / f"run{operation}", legs=TWO_LEGS)
        submit = partial(spool.submit, tasks, samples=2, key="k")
        killed = killed_before(operation, spool.paths.root, submit)
        seen = Spool.open(spool.paths.root).segments()
        assert [segment.size for segment in seen] in ([], [6])
        assert submit().created == (seen == ())
        work_through(spool)
        check_exactly_one_result(spool)
        if not killed:
            break
    assert operation > 10
