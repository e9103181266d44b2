"""Whoever is killed first, worker, attendant or container: nothing of a sandbox outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcroll.config import SandboxConfig
from hpcroll.errors import SandboxError
from hpcroll.sandboxes.apptainer import ApptainerProvider
from hpcroll.sandboxes.attendant.processes import descendants
from hpcroll.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from hpcroll.sandboxes.bwrap import BwrapProvider
from hpcroll.sandboxes.scratch import Scratch, sweep
from hpcroll.testing.sandbox_bench import PATIENCE_S, living, until
from tests.capabilities import IMAGES, need

Make = Callable[..., SandboxProvider]

WORKER = """
    import asyncio, sys
    from hpcroll.config import SandboxConfig
    from hpcroll.plugins import Family, load
    from hpcroll.sandboxes.base import SandboxSpec

    async def main(config):
        provider = load(Family.SANDBOX, config.name)(config)
        sandbox = await provider.start(SandboxSpec(name="doomed", image=None))
        await sandbox.exec(["sh", "-c", "touch left; exec sleep 600"], timeout_s=600)

    asyncio.run(main(SandboxConfig.model_validate_json(sys.argv[1])))
"""


def config(kind: str, scratch: Path) -> SandboxConfig:
    if kind == "bwrap":
        need("bwrap")
        return SandboxConfig(name="bwrap", scratch=scratch)
    path = IMAGES / {"apptainer-directory": "base", "apptainer-sif": "base.sif"}[kind]
    return SandboxConfig(name="apptainer", image=str(path), scratch=scratch)


def provider(config: SandboxConfig) -> SandboxProvider:
    return (BwrapProvider if config.name == "bwrap" else ApptainerProvider)(config)


kinds = pytest.mark.parametrize(
    "kind",
    [
        "bwrap",
        pytest.param("apptainer-directory", marks=pytest.mark.apptainer),
        pytest.param("apptainer-sif", marks=pytest.mark.apptainer),
    ],
)


def processes_of(scratch: Path) -> set[int]:
    """Every process of the sandboxes below `scratch`: attendants, runtimes, image servers, payloads."""
    mine = descendants(os.getpid())
    return {pid for pid in mine if pid in living(str(scratch)) or _is_attendant(pid)} | {
        child for pid in mine if _is_attendant(pid) for child in descendants(pid)
    }


def roles(pids: list[int]) -> dict[str, int]:
    """Which of a sandbox's processes is which."""
    attendants = [pid for pid in pids if _is_attendant(pid)]
    outer, keeper, lane = attendants
    runtime = next(pid for pid in descendants(outer) if pid not in attendants)
    init = descendants(runtime)[0]
    return {"attendant": outer, "keeper": keeper, "lane": lane, "runtime": runtime, "init": init}


def _is_attendant(pid: int) -> bool:
    try:
        return b"attendant.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def left_below(root: Path, prefix: str) -> list[str]:
    """Names below `root` that begin with `prefix`; directories may vanish meanwhile, unlike with rglob."""
    names = [name for _path, folders, files in os.walk(root) for name in (*folders, *files)]
    return [name for name in names if name.startswith(prefix)]


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@kinds
def test_a_killed_worker_takes_its_sandboxes_and_their_scratch_along(tmp_path: Path, kind: str) -> None:
    argv = [sys.executable, "-c", textwrap.dedent(WORKER), config(kind, tmp_path).model_dump_json()]

    with subprocess.Popen(argv, start_new_session=True) as worker:
        try:
            asyncio.run(until(lambda: bool(left_below(tmp_path, "left")), "the payload writes"))
            everything = [worker.pid, *descendants(worker.pid)]
        finally:
            worker.kill()
    asyncio.run(until(lambda: not any(map(exists, everything)), "all processes are gone"))
    asyncio.run(until(lambda: not left_below(tmp_path, "doomed-"), "the scratch is gone"))


@kinds
@pytest.mark.parametrize("victim", ["attendant", "keeper", "lane", "runtime", "init"])
def test_whichever_process_of_a_sandbox_is_killed_the_rest_follows(
    tmp_path: Path, kind: str, victim: str
) -> None:
    async def body() -> None:
        sandbox = await provider(config(kind, tmp_path)).start(SandboxSpec(name="victim", image=None))
        everything = sorted(processes_of(tmp_path))
        os.kill(roles(everything)[victim], signal.SIGKILL)
        deadline_s = time.monotonic() + PATIENCE_S
        if victim == "lane":
            # The payload's own namespace only: the next command gets another one.
            with pytest.raises(SandboxError):
                await sandbox.exec(["cat"], timeout_s=PATIENCE_S)
            assert (await sandbox.exec(["cat"], stdin=b"fine", timeout_s=PATIENCE_S)).stdout == b"fine"
        else:
            while await sandbox.alive():  # a dead runtime may take a moment to arrive inside
                assert time.monotonic() < deadline_s, "the sandbox outlives one of its own processes"
            with pytest.raises(SandboxError):
                await sandbox.exec(["cat"], timeout_s=PATIENCE_S)
        await sandbox.stop()
        await until(lambda: not any(map(exists, everything)), "all processes are gone")
        assert left_below(tmp_path, "victim-") == []

    asyncio.run(body())


@kinds
def test_signals_to_every_process_of_a_step_leave_the_sandbox_alive(tmp_path: Path, kind: str) -> None:
    async def body() -> None:
        sandbox = await provider(config(kind, tmp_path)).start(SandboxSpec(name="signalled", image=None))
        try:
            payload = asyncio.create_task(
                sandbox.exec(
                    ["sh", "-c", "touch up; while [ ! -e end ]; do sleep 0.01; done; echo ok"],
                    timeout_s=PATIENCE_S,
                )
            )
            await until(lambda: bool(left_below(tmp_path, "up")), "the payload starts")
            for pid in processes_of(tmp_path):
                for number in (signal.SIGUSR1, signal.SIGUSR2):
                    _signal(pid, number)
            await sandbox.put(b"", "end")
            assert (await payload).stdout == b"ok\n"
            for pid in processes_of(tmp_path):
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    _signal(pid, number)
            assert await sandbox.alive()
            result = await sandbox.exec(["cat"], stdin=b"fine", timeout_s=PATIENCE_S)
            assert result.stdout == b"fine"
        finally:
            await sandbox.stop()

    asyncio.run(body())


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


@kinds
def test_many_sandboxes_at_once_all_start_and_all_end(tmp_path: Path, kind: str) -> None:
    async def one(source: SandboxProvider, number: int) -> bytes:
        sandbox: Sandbox = await source.start(SandboxSpec(name=f"many-{number}", image=None))
        try:
            result = await sandbox.exec(["cat"], stdin=str(number).encode(), timeout_s=PATIENCE_S)
            return result.stdout
        finally:
            await sandbox.stop()

    async def body() -> None:
        source = provider(config(kind, tmp_path))
        outputs = await asyncio.gather(*(one(source, number) for number in range(24)))
        assert outputs == [str(number).encode() for number in range(24)]
        assert processes_of(tmp_path) == set()
        assert left_below(tmp_path, "many-") == []

    asyncio.run(body())


def test_scratch_of_dead_workers_is_swept_and_of_living_ones_is_not(tmp_path: Path) -> None:
    script = f"""
        import sys
        from pathlib import Path
        from hpcroll.sandboxes.scratch import Scratch
        scratch = Scratch(Path({str(tmp_path)!r}))
        (scratch.make("left") / "file").write_text("x")
        print(scratch.root, flush=True)
        sys.stdin.read()
    """
    alive = Scratch(tmp_path)
    alive.make("mine")
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None
        dead = Path(worker.stdout.readline().strip())
        assert sweep(tmp_path) == []
        worker.kill()
    assert sweep(tmp_path) == [dead]
    assert not dead.exists()
    assert alive.root.exists()
    alive.close()
    assert not alive.root.exists()
