"""A worker that dies without a word; called as the interpreter of a rank is:

    python -m tests.faults.seal_worker -m hpcroll.worker RUN --leg LEG --rank N

It commits two rollouts, the second without its mark, claims a third and kills itself; nobody writes
`.ended` for it. Rank 1 lives on until the file `release` appears in the run directory.

With `SEAL_WORKER=stays` in its environment each rank does that much, then writes `logs/stays.<rank>` and
beats until there is a file `release`; rank 2 leaves its job first, so that the scheduler takes it for dead.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from hpcroll.shards import ShardWriter
from hpcroll.spool import BeatCounts, Claims, Heartbeat, Incarnation, Spool, sync_done_directories
from hpcroll.worker.assembly import Assembly
from hpcroll.worker.pools import Flight


def main() -> None:
    run_dir, leg, rank = Path(sys.argv[3]), sys.argv[5], int(sys.argv[7])
    stays = os.environ.get("SEAL_WORKER") == "stays"
    if stays and rank == 2:
        leave_job()
    spool = Spool.open(run_dir)
    incarnation = Incarnation.register(spool, leg=leg, rank=rank)
    if rank == 1 and not stays:
        (run_dir / "logs" / "alive").write_text(incarnation.id)
        while not (run_dir / "release").exists():
            time.sleep(0.02)
        return
    claims = Claims(spool, incarnation, job_ended=lambda worker: None)
    assembly = Assembly(spool, incarnation, harness="react", harness_version="1")
    writer = ShardWriter(spool.paths, incarnation.id, spool.config.shards)
    for mark in (True, False):
        claim = claims.next()
        assert claim is not None
        draft = assembly.draft(claim, status="completed", stop_reason="submitted")
        claim.note_record()
        address = writer.append(assembly.finish(draft, Flight(claim), None))
        writer.sync()
        assert claim.link_done()
        sync_done_directories([claim])
        if mark:
            writer.mark([address])
    assert claims.next() is not None
    if stays:
        stay(incarnation, run_dir / "logs" / f"stays.{rank}", until=run_dir / "release")
    os.kill(os.getpid(), signal.SIGKILL)


def leave_job() -> None:
    """Makes of this process one that no job's process is an ancestor of, and that holds no file of a job."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)


def stay(incarnation: Incarnation, note: Path, *, until: Path) -> None:
    """Beats until there is a file `until`; `note` gets the incarnation's name after the first beat."""
    heartbeat = Heartbeat(incarnation)
    heartbeat.beat(BeatCounts())
    note.write_text(incarnation.id)
    while not until.exists():
        time.sleep(0.2)
        heartbeat.beat(BeatCounts())


if __name__ == "__main__":
    main()
