"""A worker that dies without a word; called as the interpreter of a rank is:

    python -m tests.faults.seal_worker -m hpcroll.worker RUN --leg LEG --rank N

It commits two rollouts, the second without its mark, claims a third and kills itself; nobody writes
`.ended` for it. Rank 1 lives on until the file `release` appears in the run directory.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from hpcroll.shards import ShardWriter
from hpcroll.spool import Claims, Incarnation, Spool, sync_done_directories
from hpcroll.worker.assembly import Assembly
from hpcroll.worker.pools import Flight


def main() -> None:
    run_dir, leg, rank = Path(sys.argv[3]), sys.argv[5], int(sys.argv[7])
    spool = Spool.open(run_dir)
    incarnation = Incarnation.register(spool, leg=leg, rank=rank)
    if rank == 1:
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
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
