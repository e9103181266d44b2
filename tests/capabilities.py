"""What this machine can do, and what a missing capability means for a test.

A test that needs one is skipped with its name, unless `HPCROLL_REQUIRE` lists it (CI lists what its
set-up installs): then it fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

IMAGES = Path(os.environ.get("HPCROLL_TEST_IMAGES", "/var/lib/hpcroll-test/images"))
AGENTS = Path(os.environ.get("HPCROLL_TEST_AGENTS", "/var/lib/hpcroll-test/agents"))
ENGINE = Path("/var/lib/hpcroll-test/engine")
CONSUMERS = Path(os.environ.get("HPCROLL_TEST_CONSUMERS", "/var/lib/hpcroll-test/consumers"))
SFTP_SERVER = Path("/usr/lib/openssh/sftp-server")
TASK_DATA = Path(os.environ.get("HPCROLL_TASK_DATA") or Path(__file__).parents[2] / "shared" / "data")


def _slurm() -> str | None:
    if shutil.which("sinfo") is None:
        return "sinfo is not installed"
    answer = subprocess.run(["sinfo", "-h"], capture_output=True, text=True, timeout=60)
    return None if answer.returncode == 0 and answer.stdout else f"sinfo: {answer.stderr.strip()}"


def _apptainer() -> str | None:
    if shutil.which("apptainer") is None:
        return "apptainer is not installed"
    return None if (IMAGES / "base").is_dir() else f"no image at {IMAGES / 'base'}"


def _engine() -> str | None:
    stamp = ENGINE / ".installed"
    return None if stamp.exists() else f"no inference engine at {ENGINE} (tests/setup/install-engine)"


def _agent(*names: str) -> str | None:
    lacks = [name for name in names if not any(AGENTS.glob(f"{name}-*.tar.zst"))]
    return f"no {', '.join(lacks)} in {AGENTS} (tests/setup/install-agents NAME)" if lacks else None


def _task_data() -> str | None:
    return None if TASK_DATA.is_dir() else f"no folder {TASK_DATA} (set HPCROLL_TASK_DATA)"


def _userns() -> str | None:
    command = ["unshare", "--user", "--map-root-user", "true"]
    return None if subprocess.run(command, capture_output=True).returncode == 0 else "unshare --user fails"


def _sharedfs() -> str | None:
    lacks = [program for program in ("sshfs", "fusermount3") if shutil.which(program) is None]
    lacks += [] if SFTP_SERVER.exists() else ["openssh-sftp-server"]
    lacks += [] if os.access("/dev/fuse", os.R_OK | os.W_OK) else ["read and write access to /dev/fuse"]
    return f"no {', '.join(lacks)}" if lacks else None


def _torch() -> str | None:
    return None if find_spec("torch") is not None else "torch is not installed (the extra `torch`)"


def _consumer(name: str) -> str | None:
    stamp = CONSUMERS / name / ".installed"
    return None if stamp.exists() else f"no {name} at {CONSUMERS} (tests/setup/install-consumers {name})"


_COMMON_AGENTS = ("agent:pi", "agent:mini_swe_agent")
"""What `tests/setup/install-agents` installs without arguments: the capability `agents`."""
_PROBES: dict[str, Callable[[], str | None]] = {
    "slurm": _slurm,
    "agents": lambda: _agent(*(name.removeprefix("agent:") for name in _COMMON_AGENTS)),
    "apptainer": _apptainer,
    "bwrap": _userns,
    "engine": _engine,
    "userns": _userns,
    "sharedfs": _sharedfs,
    "task-data": _task_data,
    "torch": _torch,
    "consumers": lambda: _consumer("trainers"),
}


@cache
def missing(capability: str) -> str | None:
    """Why `capability` is not there; None where it is.

    `agent:NAME` is an installed agent program, `consumer:NAME` what reads exports.
    """
    kind, _, name = capability.partition(":")
    if kind == "consumer":
        return _consumer(name)
    return _agent(name) if kind == "agent" else _PROBES[capability]()


def need(capability: str) -> None:
    """Skips the calling test where `capability` is missing; fails it where it is required."""
    reason = missing(capability)
    if reason is None:
        return
    message = f"capability {capability} is missing: {reason}"
    required = os.environ.get("HPCROLL_REQUIRE", "").split(",")
    common = ("agents" in required and capability in _COMMON_AGENTS) or (
        "consumers" in required and capability == "consumer:trainers"
    )
    if capability in required or common:
        pytest.fail(message)
    pytest.skip(message)
