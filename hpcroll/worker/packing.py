"""The packer beside a worker: a process of its own, the first to give way.

`python -m hpcroll.worker.packing RUN` packs until the run is closed. The rank's parent starts it and kills it
with the worker's tree; whatever it was doing then, nothing half-made is visible.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcroll.errors import HpcrollError
from hpcroll.spool import Spool
from hpcroll.worker.processes import die_with_parent

_LEAST_NICE = 19
_FIRST_TO_DIE = "1000"


def packing_command(run_dir: Path, leg: str | None, rank: int) -> Sequence[str] | None:
    """What packs beside rank `rank` of `leg`; None where the config or another rank does not ask for it."""
    try:
        config = Spool.open(run_dir).config
    except HpcrollError:
        return None  # the worker meets the same error, and says it
    is_last = (leg or config.leg_names[0]) == config.leg_names[-1]
    if config.shards.pack == "off" or rank != 0 or not is_last:
        return None
    return [sys.executable, "-m", "hpcroll.worker.packing", str(run_dir)]


def main(run_dir: Path) -> None:
    """Packs, and deletes where the config says so, until the run is closed."""
    # Not at the top: the rank's parent imports this module, and stays small.
    from hpcroll.shards.level1.following import follow_packing
    from hpcroll.shards.level1.packer import Packer, PackOptions
    from hpcroll.shards.level1.retention import Retention

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
