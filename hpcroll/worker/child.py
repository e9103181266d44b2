"""The worker process itself: puts a worker together from the run's config and runs it."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from hpcroll.config import RunConfig
from hpcroll.contract import Stage
from hpcroll.errors import ConfigError, HpcrollError, IsolationUnavailableError
from hpcroll.gateway import Gateway, Journal
from hpcroll.gateway.admission import Admission
from hpcroll.gateway.attribution import PolicySource
from hpcroll.plugins import Family, load
from hpcroll.policy import Gate, WindowWatch
from hpcroll.sandboxes.base import SandboxProvider
from hpcroll.shards import ShardWriter
from hpcroll.spool import Claims, EventLog, Heartbeat, Incarnation, Spool
from hpcroll.worker.assembly import Assembly
from hpcroll.worker.committer import Committer
from hpcroll.worker.flights import Conductor
from hpcroll.worker.parent import RESTART
from hpcroll.worker.policy_view import PolicyView
from hpcroll.worker.pools import StagePools
from hpcroll.worker.processes import die_with_parent
from hpcroll.worker.scheduler import SlurmJobs
from hpcroll.worker.stages import Stages
from hpcroll.worker.worker import Worker


def main() -> int:
    """Runs one worker to its end: 0 done or drained, 1 failed, 2 bad usage, `RESTART`."""
    parser = argparse.ArgumentParser(prog="python -m hpcroll.worker.child", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--leg")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--announce-fd", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        spool = Spool.open(arguments.run_dir)
        leg = _pick_leg(spool.config, arguments.leg)
        return asyncio.run(_work(spool, leg, rank=arguments.rank, announce_fd=arguments.announce_fd))
    except HpcrollError as error:
        print(f"worker: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _pick_leg(config: RunConfig, name: str | None) -> int:
    if name is None and len(config.legs) == 1:
        return 0
    if name not in config.leg_names:
        known = ", ".join(config.leg_names)
        raise ConfigError(f"no leg is named {name!r}; this run's legs: {known} (give one with --leg)")
    return config.leg_names.index(name)


async def _work(spool: Spool, leg: int, *, rank: int, announce_fd: int) -> int:
    config, stages = spool.config, spool.config.legs[leg]
    provider: SandboxProvider = load(Family.SANDBOX, config.sandbox.name)(config.sandbox)
    await asyncio.to_thread(_require, provider, config)
    incarnation = Incarnation.register(spool, leg=config.leg_names[leg], rank=rank)
    os.write(announce_fd, f"{incarnation.id}\n".encode())
    os.close(announce_fd)
    harness = load(Family.HARNESS, config.harness.name)(config.harness)
    async with AsyncExitStack() as stack:
        events = stack.enter_context(EventLog(incarnation))
        writer = stack.enter_context(ShardWriter(spool.paths, incarnation.id, config.shards))
        admission = Admission()
        gateway = None
        if Stage.RUN in stages:
            gateway = await _gateway(stack, spool, incarnation, admission)
        renderer = gateway.renderer if gateway is not None else None
        pools = StagePools(config.stages, stages, events, admission=admission)
        jobs = SlurmJobs(config.lease.scheduler_poll_s)
        window = WindowWatch(spool.paths, config.model.name)
        worker = Worker(
            spool,
            incarnation,
            claims=Claims(
                spool,
                incarnation,
                job_ended=jobs.ended,
                limit=window.limit,
            ),
            pools=pools,
            conductor=Conductor(
                spool,
                stages,
                stages=Stages(config, pools, provider=provider, harness=harness, gateway=gateway),
                assembly=Assembly(
                    spool,
                    incarnation,
                    harness=config.harness.name,
                    harness_version=harness.version,
                    tokenizer_sha256=renderer.tokenizer_sha256 if renderer is not None else None,
                    template_sha256=renderer.template_sha256 if renderer is not None else None,
                ),
                provider=provider,
            ),
            committer=Committer(writer, window_s=config.shards.commit_window_s),
            heartbeat=Heartbeat(incarnation),
            events=events,
            more=window.expects_more,
        )
        # What was imported stays: looking through it stops every stream, for tens of milliseconds each time.
        gc.collect()
        gc.freeze()
        await worker.run()
        return RESTART if worker.broken else 0


async def _gateway(
    stack: AsyncExitStack, spool: Spool, incarnation: Incarnation, admission: Admission
) -> Gateway:
    """A started gateway with its journal, both closed with `stack`."""
    journal = Journal(spool.paths.journal_file(incarnation.id))
    journal.open()
    stack.push_async_callback(journal.close)
    gate = Gate(spool.paths, incarnation.id, silence_s=spool.config.lease.silence_s)
    view = await stack.enter_async_context(
        PolicyView(spool.paths, spool.config.model.name, admission=admission, gate=gate)
    )
    policy = PolicySource(known=view.policy, read=view.policy_now, history=view.history)
    gateway = Gateway(
        spool.config.model, journal=journal, upstreams=view.upstreams, policy=policy, admission=admission
    )
    stack.push_async_callback(gateway.close)
    await gateway.start()
    return gateway


def _require(provider: SandboxProvider, config: RunConfig) -> None:
    """Refuses, before anything is claimed, what this node cannot isolate."""
    able = provider.probe()
    sandbox = config.sandbox
    missing = {
        "available": not able.available,
        "network_isolation": not sandbox.network and not able.network_isolation,
        "memory_limit": sandbox.memory_mb is not None and not able.memory_limit,
        "disk_limit": sandbox.disk_mb is not None and not able.disk_limit,
    }
    lacking = [name for name, lacks in missing.items() if lacks]
    if lacking:
        reasons = "; ".join(f"{name}: {able.reasons.get(name, 'no reason given')}" for name in lacking)
        raise IsolationUnavailableError(
            f"sandbox {sandbox.name} on this node lacks what the config asks for: {reasons} "
            "(run `hpcroll doctor` here; opt out by name in the config's `sandbox` section)"
        )


if __name__ == "__main__":
    sys.exit(main())
