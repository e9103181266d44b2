"""The packer beside a worker: a process of its own, the first to give way.

`python -m hpcroll.worker.packing RUN` packs until the run is closed. The rank's parent starts it and kills it
with the worker's tree; whatever it was doing then, nothing half-made is visible.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from hpcroll.shards.level1.following import follow_packing
from hpcroll.shards.level1.packer import Packer, PackOptions
from hpcroll.shards.level1.retention import Retention
from hpcroll.spool import Spool
from hpcroll.worker.processes import die_with_parent

_LEAST_NICE = 19
_FIRST_TO_DIE = "1000"


def main(run_dir: Path) -> None:
    """Packs, and deletes where the config says so, until the run is closed."""
    die_with_parent()
    os.nice(_LEAST_NICE)
    with contextlib.suppress(OSError):  # the kernel then takes this process before the worker
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_DIE)
    spool = Spool.open(run_dir)
    config = spool.config.shards
    packer = Packer(spool.paths, PackOptions.of(config))
    retention = Retention(spool.paths) if config.retain else None
    for done in follow_packing(spool.paths, packer, retention=retention):
        for made in done.packed.packs:
            print(f"packed: file={made.file} rows={made.rows} groups={made.groups}", flush=True)
        for name in done.retained.deleted if done.retained is not None else ():
            print(f"deleted: shard={name}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
