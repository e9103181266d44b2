"""Latency of one action: a command through the public `exec`, beside the same command without a sandbox.

    make bench-action

The bare command is spawned as the attendant spawns it (posix_spawn, two pipes, wait), in turns with the
others, so that the machine's other work meets all of them alike. The last line compares medians over the
quieter half of the rounds, chosen by the bare command alone: a directory image (apptainer), the node's own
system (bwrap). Then come the median of one `apptainer exec` for each action, and the 99th percentile of an
action where 32 sandboxes run one after the other each, all at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import chain
from pathlib import Path

from hpcroll.config import SandboxConfig, StartLimits
from hpcroll.sandboxes.apptainer import ApptainerProvider, find_apptainer
from hpcroll.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from hpcroll.sandboxes.bwrap import BwrapProvider

IMAGES = Path(os.environ.get("HPCROLL_TEST_IMAGES", "/var/lib/hpcroll-test/images"))
COMMAND = "/bin/true"
SHELLS = 32
PERCENTILES = (10, 50, 90, 99)
BLOCK = 20
"""Rounds that are quiet or not together."""


def bare_s() -> float:
    """One run of the command on the node itself, output read to its end."""
    started_s = time.perf_counter()
    pipes = [os.pipe(), os.pipe()]
    actions = [
        (os.POSIX_SPAWN_DUP2, writer, target) for target, (_reader, writer) in enumerate(pipes, start=1)
    ]
    pid = os.posix_spawn(COMMAND, [COMMAND], {}, file_actions=actions, setsid=True)
    for _reader, writer in pipes:
        os.close(writer)
    for reader, _writer in pipes:
        while os.read(reader, 1 << 16):
            pass
        os.close(reader)
    os.waitpid(pid, 0)
    return time.perf_counter() - started_s


def exec_s(image: Path) -> float:
    """One `apptainer exec` of the command, isolated as a sandbox is."""
    flags = ["--quiet", "exec", "--userns", "--containall", "--cleanenv", "--no-home", "--pwd", "/"]
    argv = [find_apptainer(), *flags, "--net", "--network", "none", str(image), COMMAND]
    started_s = time.perf_counter()
    subprocess.run(argv, check=True, capture_output=True)
    return time.perf_counter() - started_s


async def action_s(sandbox: Sandbox) -> float:
    started_s = time.perf_counter()
    result = await sandbox.exec([COMMAND], timeout_s=60)
    elapsed_s = time.perf_counter() - started_s
    assert result.exit_code == 0, result
    return elapsed_s


async def start(stack: AsyncExitStack, provider: SandboxProvider, name: str) -> Sandbox:
    sandbox = await provider.start(SandboxSpec(name=name, image=None))
    stack.push_async_callback(sandbox.stop)
    return sandbox


async def in_turns(sandboxes: dict[str, Sandbox], actions: int) -> dict[str, list[float]]:
    """Latencies by name, `bare` included; each round runs every one of them once."""
    taken_s: dict[str, list[float]] = {"bare": [], **{name: [] for name in sandboxes}}
    order = list(sandboxes.items())
    for _ in range(actions):
        taken_s["bare"].append(bare_s())
        for name, sandbox in order:
            taken_s[name].append(await action_s(sandbox))
        order.append(order.pop(0))  # none always runs behind the same neighbour
    return taken_s


async def all_at_once(provider: SandboxProvider, actions: int) -> list[float]:
    """Latencies of `SHELLS` sandboxes that each run `actions` commands one after the other."""

    async def one(sandbox: Sandbox) -> list[float]:
        return [await action_s(sandbox) for _ in range(actions)]

    async with AsyncExitStack() as stack:
        names = [f"shell-{number}" for number in range(SHELLS)]
        sandboxes = await asyncio.gather(*(start(stack, provider, name) for name in names))
        return list(chain.from_iterable(await asyncio.gather(*map(one, sandboxes))))


def over_bare_ms(name: str, *runs: dict[str, list[float]]) -> float:
    """How much longer the median action takes than the median bare command, in the quieter half of blocks."""
    blocks = [
        (taken_s["bare"][start : start + BLOCK], taken_s[name][start : start + BLOCK])
        for taken_s in runs
        for start in range(0, len(taken_s["bare"]), BLOCK)
    ]
    blocks.sort(key=lambda block: statistics.median(block[0]))
    quiet = blocks[: (len(blocks) + 1) // 2]
    bare_s, action_s = (statistics.median(chain.from_iterable(part)) for part in zip(*quiet, strict=True))
    return (action_s - bare_s) * 1e3


def row(name: str, taken_s: list[float]) -> str:
    cuts = statistics.quantiles(taken_s, n=100)
    return f"{name:38}{len(taken_s):8}" + "".join(f"{cuts[at - 1] * 1e3:12.3f}" for at in PERCENTILES)


async def measure(scratch: Path, actions: int, say: Callable[[str], None]) -> str:
    """Prints the table and returns the last line."""
    limits = StartLimits(per_node=8, per_image=8)
    base = SandboxConfig(scratch=scratch, start_limits=limits)
    directory, sif = str(IMAGES / "base"), str(IMAGES / "base.sif")
    providers: dict[str, SandboxProvider] = {
        "apptainer, directory": ApptainerProvider(base.model_copy(update={"image": directory})),
        "apptainer, SIF": ApptainerProvider(base.model_copy(update={"image": sif})),
        "bwrap, directory": BwrapProvider(base.model_copy(update={"name": "bwrap", "image": directory})),
        "bwrap, host": BwrapProvider(base.model_copy(update={"name": "bwrap"})),
    }
    say(f"{'milliseconds':38}{'actions':>8}" + "".join(f"{f'p{at}':>12}" for at in PERCENTILES))
    async with AsyncExitStack() as stack:
        sandboxes = {name: await start(stack, provider, name) for name, provider in providers.items()}
        await in_turns(sandboxes, 20)  # the first ones read programs from disk
        taken_s = await in_turns(sandboxes, actions)
        for name, values in taken_s.items():
            say(row(name, values))
        for sandbox in sandboxes.values():
            assert (await sandbox.exec(["sleep", "60"], timeout_s=0.05)).timed_out
        after_s = await in_turns(sandboxes, actions)
        for name, values in after_s.items():
            say(row(f"{name}, after a time-out", values))
    each_s = [exec_s(IMAGES / "base") for _ in range(max(5, actions // 20))]
    say(row("apptainer exec for each action", each_s))
    crowd_s = await all_at_once(providers["apptainer, directory"], max(10, actions // 5))
    say(row(f"apptainer, {SHELLS} sandboxes at once", crowd_s))
    return (
        f"apptainer_action_over_bare_ms={over_bare_ms('apptainer, directory', taken_s, after_s):.3f} "
        f"bwrap_action_over_bare_ms={over_bare_ms('bwrap, host', taken_s, after_s):.3f} "
        f"exec_per_action_ms={statistics.median(each_s) * 1e3:.1f} "
        f"p99_32_ms={statistics.quantiles(crowd_s, n=100)[98] * 1e3:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--actions", type=int, default=400, help="actions of each kind (default 400)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hpcroll-bench-") as folder:
        print(asyncio.run(measure(Path(folder), arguments.actions, print)))


if __name__ == "__main__":
    main()
