"""A harness that reports what an agent inside a sandbox can reach: its model, and nothing else."""

from __future__ import annotations

import json
from typing import ClassVar

from hpcroll.config import HarnessConfig, Strict
from hpcroll.contract import StopReason
from hpcroll.harnesses.base import AgentSession

_TIMEOUT_S = 60.0
_PROGRAM = """
import json, socket, sys, urllib.request

base_url, key, model, prompt, targets = json.loads(sys.argv[1])
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
print(json.dumps({"reply": reply["choices"][0]["message"]["content"], "reached": reached}))
"""


class ReachOptions(Strict):
    """Options of `ReachHarness`."""

    targets: tuple[tuple[str, int], ...] = ()
    """Hosts and ports that the agent tries to connect to."""


class ReachHarness:
    """Runs a Python program in the sandbox that calls the model once and tries every target.

    The answer is JSON: `reply`, the model's words, and `reached`, the targets that it could connect to.
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
        given = [endpoint.base_url, endpoint.api_key, endpoint.model, session.prompt, self._options.targets]
        argv = ["python3", "-c", _PROGRAM, json.dumps(given)]
        result = await session.sandbox.exec(argv, timeout_s=_TIMEOUT_S)
        session.answer = (result.stdout if result.exit_code == 0 else result.stderr).decode(errors="replace")
        return StopReason.EXITED
