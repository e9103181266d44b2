"""A harness that reports what an agent inside a sandbox can reach: its model, and nothing else."""

from __future__ import annotations

import json
from typing import ClassVar

from hpcroll.config import HarnessConfig, Strict
from hpcroll.contract import StopReason
from hpcroll.harnesses.base import AgentSession

_TIMEOUT_S = 60.0
_PROGRAM = """
import json, os, socket, sys, urllib.request

base_url, key, model, prompt, targets, paths, scan = json.loads(sys.argv[1])
body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
request = urllib.request.Request(
    base_url + "/chat/completions",
    data=json.dumps(body).encode(),
    headers={"Content-Type": "application/json", "Authorization": "Bearer " + key},
)
reply = json.load(urllib.request.urlopen(request, timeout=30))
reached = []
for host, port in targets:
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError:
        continue
    reached.append([host, port])
open_ports = []
for port in range(1, 65536) if scan else ():
    with socket.socket() as probe:
        # A socket may connect to itself, where its own port is the one that it tries.
        if probe.connect_ex(("127.0.0.1", port)) == 0 and probe.getsockname() != probe.getpeername():
            open_ports.append(port)
found = {
    "reply": reply["choices"][0]["message"]["content"],
    "reached": reached,
    "open_ports": open_ports,
    "seen": [path for path in paths if os.path.lexists(path)],
}
print(json.dumps(found))
"""


class ReachOptions(Strict):
    """Options of `ReachHarness`."""

    targets: tuple[tuple[str, int], ...] = ()
    """Hosts and ports that the agent tries to connect to."""
    paths: tuple[str, ...] = ()
    """Files and directories that it looks for."""
    scan: bool = False
    """Try every port of 127.0.0.1."""


class ReachHarness:
    """Runs a Python program in the sandbox that calls the model once and tries every target.

    The answer is JSON: `reply`, the model's words; `reached`, the targets that it could connect to;
    `open_ports`, found by the scan; `seen`, the paths that are there.
    """

    Options: ClassVar[type[Strict]] = ReachOptions
    name: ClassVar[str] = "reach"
    version: str = "1"
    inside: ClassVar[bool] = True

    def __init__(self, config: HarnessConfig) -> None:
        self._options = ReachOptions.model_validate(config.options)

    async def run(self, session: AgentSession) -> StopReason:
        """One command in the sandbox; see `Harness.run`."""
        endpoint = session.endpoint
        options = self._options
        given: list[object] = [endpoint.base_url, endpoint.api_key, endpoint.model, session.prompt]
        given += [options.targets, options.paths, options.scan]
        argv = ["python3", "-c", _PROGRAM, json.dumps(given)]
        result = await session.sandbox.exec(argv, timeout_s=_TIMEOUT_S)
        session.answer = (result.stdout if result.exit_code == 0 else result.stderr).decode(errors="replace")
        return StopReason.EXITED
