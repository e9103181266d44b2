"""What a process has used, and how a measuring process is started."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TIME_OUT_S = 900


def peak_memory_mb() -> float:
    """The most memory that this process ever had resident (VmHWM), mapped files included, in MB."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def run_json(
    argv: list[str], *, scratch: Path, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The object that the command prints last; raises `SystemExit` with its errors where it fails."""
    surroundings = {
        **os.environ,
        "PYTHONPATH": str(Path.cwd()),
        "TMPDIR": str(scratch),
        **(environment or {}),
    }
    # Threads of numeric libraries would compete with what is measured; loaders ask for none.
    surroundings |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(argv, env=surroundings, capture_output=True, text=True, timeout=_TIME_OUT_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
