"""What the gateway adds to a model call, beside what LiteLLM's proxy adds to the same one.

    make bench-gateway

Streaming calls of a growing conversation with tools go directly to a scripted inference server, through
hpcroll's gateway (a process of its own, its journal on disk and fsynced) and through LiteLLM's proxy. An
added latency is a call's time to the end of its reply, less the median of the direct calls of its round. One
session takes the three routes call by call in turns; 32 and 256 sessions pause between their calls and take
the routes round by round; last, 32 sessions without a pause show what each route carries. At the end the
journal is compared with what was sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.benchmarks import gateway_servers as servers
from tests.benchmarks.gateway_client import Load, Sample, at_once, in_turns
from tests.benchmarks.gateway_conversation import REPLY_TOKENS, TURNS
from tests.benchmarks.gateway_process import journal_file
from tests.benchmarks.gateway_servers import Server

PEERS = Path(os.environ.get("HPCROLL_TEST_PEERS", "/var/lib/hpcroll-test/peers"))
DIRECT, OURS, PEER = "direct", "hpcroll", "litellm"
PREFIXES = {DIRECT: "direct_", OURS: "", PEER: "peer_"}
ONE = Load(sessions=1, first_token_s=0.02, token_s=0.002)
ONE_CALLS = 45
"""Over each route in a round."""
CROWDS = {
    "_32": Load(sessions=32, first_token_s=0.05, token_s=0.01, pause_s=3.3, window_s=7),
    "_256": Load(sessions=256, first_token_s=0.05, token_s=0.04, pause_s=29.4, window_s=7),
}
"""8 calls in a second: LiteLLM's proxy carries about 14."""
BUSY = Load(sessions=256, first_token_s=0.05, token_s=0.04, pause_s=4, window_s=7)
"""39 calls in a second, without LiteLLM's proxy."""
FLOOD = Load(sessions=32, token_s=0.001, window_s=5)
"""More than anything here can carry."""


@dataclass
class Tally:
    """What one route did under one load."""

    samples: list[Sample] = field(default_factory=list)
    added_s: list[float] = field(default_factory=list)
    first_added_s: list[float] = field(default_factory=list)
    calls: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def add(self, made: list[Sample], direct: list[Sample], *, cpu_s: float, wall_s: float) -> None:
        """Takes one round's calls beside the direct ones of the same round."""
        counted = [sample for sample in made if sample.counts]
        base_s = statistics.median(sample.total_s for sample in direct if sample.counts)
        first_base_s = statistics.median(sample.first_s for sample in direct if sample.counts)
        self.samples += counted
        self.added_s += [sample.total_s - base_s for sample in counted]
        self.first_added_s += [sample.first_s - first_base_s for sample in counted]
        self.calls += len(made)
        self.cpu_s += cpu_s
        self.wall_s += wall_s

    @property
    def cpu_ms(self) -> float:
        """Processor time of the route's own process for each call."""
        return self.cpu_s / self.calls * 1e3

    def row(self, name: str) -> str:
        columns = ([it.total_s for it in self.samples], self.added_s, self.first_added_s)
        figures = (*(figure for column in columns for figure in percentiles_ms(column)), self.cpu_ms)
        return f"{name:16}{len(self.samples):7}" + "".join(f"{figure:10.2f}" for figure in figures)


TITLES = ("p50", "p99", "added p50", "added p99", "first p50", "first p99", "cpu")
HEADER = f"{'milliseconds':16}{'calls':>7}" + "".join(f"{title:>10}" for title in TITLES)


def percentiles_ms(values_s: list[float]) -> tuple[float, float]:
    """Median and 99th percentile, in milliseconds."""
    cuts = statistics.quantiles(values_s, n=100, method="inclusive")
    return statistics.median(values_s) * 1e3, cuts[98] * 1e3


class Bench:
    """The routes, and the ways to load them."""

    def __init__(self, client: aiohttp.ClientSession, routes: Mapping[str, Server]) -> None:
        self._client = client
        self._routes = routes
        self.recorded_calls = 0
        """Those that went through hpcroll's gateway."""

    async def one_session(self, rounds: int, calls: int) -> dict[str, Tally]:
        """`calls` in a round, each over every route in turns."""
        tallies = {name: Tally() for name in self._routes}
        await self._set_pace(ONE)
        routes = {name: server.route for name, server in self._routes.items()}
        for _ in range(rounds):
            before_s = {name: server.cpu_s() for name, server in self._routes.items()}
            samples = await in_turns(self._client, routes, calls)
            for name, tally in tallies.items():
                used_s = self._routes[name].cpu_s() - before_s[name]
                wall_s = sum(sample.total_s for sample in samples[name])
                tally.add(samples[name], samples[DIRECT], cpu_s=used_s, wall_s=wall_s)
        self.recorded_calls += tallies[OURS].calls
        return tallies

    async def crowd(
        self, load: Load, rounds: int, routes: tuple[str, ...] = (DIRECT, OURS, PEER)
    ) -> dict[str, Tally]:
        """Every route under the whole load, one after the other, in an order that rotates."""
        tallies = {name: Tally() for name in routes}
        await self._set_pace(load)
        order = list(routes)
        for seed in range(rounds):
            samples, used = {}, {}
            for name in order:
                server = self._routes[name]
                began_s, before_s = time.perf_counter(), server.cpu_s()
                samples[name] = await at_once(self._client, server.route, load, seed=seed)
                used[name] = {"cpu_s": server.cpu_s() - before_s, "wall_s": time.perf_counter() - began_s}
            for name, tally in tallies.items():
                tally.add(samples[name], samples[DIRECT], **used[name])
            order.append(order.pop(0))
        self.recorded_calls += tallies[OURS].calls
        return tallies

    async def _set_pace(self, load: Load) -> None:
        url = self._routes[DIRECT].route.base_url.removesuffix("/v1")
        pace = {"first_s": load.first_token_s, "token_s": load.token_s}
        async with self._client.post(f"{url}/pace", json=pace) as response:
            response.raise_for_status()


class Report:
    """The tables, and the figures of the last line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._spans_s: dict[str, tuple[float, float]] = {}
        self.figures: dict[str, float] = {}

    async def take(self, suffix: str, load: Load, run: Awaitable[dict[str, Tally]]) -> dict[str, Tally]:
        """Runs one load and tells what it gave."""
        began_s = time.perf_counter()
        tallies = await run
        self._spans_s[suffix] = (began_s, time.perf_counter())
        self._say(f"\n{load.sessions} at once, {load.token_s * 1e3:g} ms a token\n{HEADER}")
        for name, tally in tallies.items():
            self._say(tally.row(name))
        for name, tally in tallies.items():
            if name != DIRECT:
                self._note(PREFIXES[name], suffix, tally)
        return tallies

    def _note(self, prefix: str, suffix: str, tally: Tally) -> None:
        median_ms, tail_ms = percentiles_ms(tally.added_s)
        self.figures[f"{prefix}added_ms_p50{suffix}"] = median_ms
        self.figures[f"{prefix}added_ms_p99{suffix}"] = tail_ms
        self.figures[f"{prefix}first_added_ms_p50{suffix}"] = percentiles_ms(tally.first_added_s)[0]
        self.figures[f"{prefix}cpu_ms{suffix}"] = tally.cpu_ms

    def flood(self, tallies: Mapping[str, Tally]) -> None:
        """Notes what each route carried of more than it can."""
        for name, tally in tallies.items():
            tokens = REPLY_TOKENS * tally.calls
            self.figures[f"{PREFIXES[name]}stream_tokens_per_s"] = tokens / tally.wall_s

    def waits(self, waits_s: Sequence[tuple[float, float]]) -> None:
        """Notes how long the journal took, from pairs of when and how long."""
        for suffix, (began_s, ended_s) in self._spans_s.items():
            within_s = [wait_s for at_s, wait_s in waits_s if began_s <= at_s <= ended_s]
            self.figures[f"journal_fsync_ms_p50{suffix}"] = statistics.median(within_s) * 1e3


def fdatasync_ms(folder: Path, writes: int = 100) -> float:
    """Median of an append of 2 KB and its `fdatasync` now and then: what the disk alone costs."""
    taken_s = []
    with (folder / "fdatasync").open("ab", buffering=0) as file:
        for _ in range(writes):
            time.sleep(0.02)  # at once after another it is faster than any call of one session finds it
            data = os.urandom(2048)
            started_s = time.perf_counter()
            file.write(data)
            os.fdatasync(file.fileno())
            taken_s.append(time.perf_counter() - started_s)
    return statistics.median(taken_s) * 1e3


async def measure(folder: Path, peers: Path, rounds: int, say: Callable[[str], None]) -> str:
    """Prints the tables and returns the last line."""
    sessions = max(load.sessions for load in CROWDS.values())
    report = Report(say)
    async with AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(limit=0)
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        upstream = await stack.enter_async_context(servers.upstream(sessions))
        ours = await stack.enter_async_context(servers.gateway(upstream, folder, sessions))
        peer = await stack.enter_async_context(servers.peer(upstream, peers, folder, sessions))
        bench = Bench(client, {DIRECT: upstream, OURS: ours, PEER: peer})
        await bench.one_session(1, TURNS)  # the first calls import and connect
        gc.freeze()
        await report.take("", ONE, bench.one_session(rounds, ONE_CALLS))
        for suffix, load in CROWDS.items():
            await report.take(suffix, load, bench.crowd(load, rounds))
        await report.take("_256_busy", BUSY, bench.crowd(BUSY, 1, (DIRECT, OURS)))
        report.flood(await report.take("_flood", FLOOD, bench.crowd(FLOOD, 1)))
        report.waits(json.loads((await ours.stop()).splitlines()[-1]))
    servers.check_journal(journal_file(folder), bench.recorded_calls)
    report.figures["fdatasync_ms_p50"] = fdatasync_ms(folder)
    return " ".join(f"{name}={value:.3f}" for name, value in report.figures.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each load (default 3)")
    parser.add_argument(
        "--peers", type=Path, default=PEERS, help=f"environment with LiteLLM (default {PEERS})"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hpcroll-bench-") as folder:
        print(asyncio.run(measure(Path(folder), arguments.peers, arguments.rounds, print)))


if __name__ == "__main__":
    main()
