"""The processes of the gateway's benchmark: the upstream, hpcroll's gateway and LiteLLM's proxy."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from hpcroll.gateway import read_journal
from tests.benchmarks.gateway_client import Route
from tests.benchmarks.gateway_conversation import MODEL, conversation

_START_S = 180.0
"""LiteLLM imports for half a minute on a busy machine."""
_STOP_S = 30.0
_PEER_KEY = "sk-bench"


class Server:
    """A process that was started, with the route that leads to it."""

    def __init__(self, process: asyncio.subprocess.Process, route: Route) -> None:
        self.process = process
        self.route = route

    def cpu_s(self) -> float:
        """Processor time that it has used, in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def stop(self) -> bytes:
        """Ends it and returns what it printed last."""
        if self.process.returncode is None:
            self.process.terminate()
        output, _ = await asyncio.wait_for(self.process.communicate(), _STOP_S)
        return output or b""


@asynccontextmanager
async def _process(*argv: str, output: int = asyncio.subprocess.PIPE, **options: Any) -> AsyncIterator[Any]:
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=output, limit=1 << 28, **options
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def upstream(sessions: int) -> AsyncIterator[Server]:
    """The inference server."""
    async with _process(sys.executable, "-m", "tests.benchmarks.gateway_upstream") as process:
        port = int(await asyncio.wait_for(process.stdout.readline(), _START_S))
        yield Server(process, Route(f"http://127.0.0.1:{port}/v1", ("none",) * sessions))


@asynccontextmanager
async def gateway(upstream: Server, folder: Path, sessions: int) -> AsyncIterator[Server]:
    """hpcroll's gateway; what it writes goes into `folder`."""
    argv = ("-m", "tests.benchmarks.gateway_process", upstream.route.base_url, str(folder), str(sessions))
    async with _process(sys.executable, *argv) as process:
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), _START_S))
        yield Server(process, Route(ready["base_url"], tuple(ready["keys"])))


@asynccontextmanager
async def peer(upstream: Server, environment: Path, folder: Path, sessions: int) -> AsyncIterator[Server]:
    """LiteLLM's proxy as its own benchmark has it: no database, no callbacks, no retries; one worker."""
    program = environment / "bin" / "litellm"
    if not program.exists():
        raise SystemExit(f"LiteLLM is not at {program}: run tests/setup/install-peers")
    parameters = {
        "model": f"hosted_vllm/{MODEL}",
        "api_base": upstream.route.base_url,
        "api_key": "none",
    }
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": parameters}],
        "litellm_settings": {"callbacks": [], "num_retries": 0, "request_timeout": 600},
        "general_settings": {"master_key": _PEER_KEY},
    }
    (folder / "litellm.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = ["--config", str(folder / "litellm.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--num_workers", "1"]
    settings = {
        # The prices of models come with the package; without this it asks a server for newer ones.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "HOME": str(folder),
        "PATH": os.environ["PATH"],
    }
    url, log = f"http://127.0.0.1:{port}", folder / "litellm.log"
    with log.open("wb") as output:
        options: dict[str, Any] = {"stderr": output, "env": settings, "cwd": folder}
        async with _process(str(program), *argv, output=output.fileno(), **options) as process:
            await _until_answered(f"{url}/health/liveliness", process, log)
            yield Server(process, Route(f"{url}/v1", (_PEER_KEY,) * sessions))


async def _until_answered(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(_START_S), aiohttp.ClientSession() as client:
        while process.returncode is None:
            try:
                async with client.get(url):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.2)
    raise SystemExit(f"{process} ended at once: {log.read_text()[-2000:]}")


def check_journal(path: Path, calls: int) -> None:
    """Raises `ValueError` where the journal does not hold `calls` calls, each as it was sampled."""
    turns = {turn.prompt_ids: turn for turn in conversation()}
    found = 0
    for recorded in read_journal(path):
        found += 1
        turn = turns[tuple(recorded.tokens.prompt_ids.tolist())]
        if recorded.call.error is not None or turn.sampled_ids != tuple(recorded.tokens.sampled_ids.tolist()):
            raise ValueError(f"call {recorded.call.call_index} was not recorded as sampled: {recorded.call}")
    if found != calls:
        raise ValueError(f"{calls} calls were made, {found} are in the journal")
