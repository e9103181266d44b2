"""A gateway and an agent in one process, for tests that kill it or fill its disk.

    gateway_agent.py URL JOURNAL CALLS [FILLER]

Makes CALLS streaming calls in one conversation after another and prints a JSON line for each: whether the
agent saw the whole reply, and its text. With FILLER, a file beside the journal grows to the end of the disk
after the third call and is removed after the sixth.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp

from hpcroll.config import ModelConfig
from hpcroll.contract import Rollout, RolloutRef, Task
from hpcroll.gateway import Gateway, Journal, ModelEndpoint

PROMPT = "Go on for as long as you can."
FULL_AFTER, FREE_AFTER = 3, 6


def rollout() -> Rollout:
    task = Task(task_id="t", handler="command", prompt=PROMPT)
    return Rollout(ref=RolloutRef(segment="0" * 16, ordinal=0), task=task, sample_index=0, group_size=1)


async def main(url: str, journal_path: Path, calls: int, filler: Path | None) -> None:
    journal = Journal(journal_path)
    journal.open()
    gateway = Gateway(ModelConfig(endpoints=(url,), call_tries=2), journal=journal)
    await gateway.start()
    endpoint = gateway.open_session(rollout(), 1).outside
    for number in range(calls):
        if filler is not None and number == FULL_AFTER:
            fill(filler)
        if filler is not None and number == FREE_AFTER:
            filler.unlink()
        print(json.dumps(await call(endpoint, number)), flush=True)
    await gateway.close()
    await journal.close()


async def call(endpoint: ModelEndpoint, number: int) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    body = {"messages": [{"role": "user", "content": f"{PROMPT} Part {number}."}], "stream": True}
    url = f"{endpoint.base_url}/chat/completions"
    async with aiohttp.ClientSession() as client, client.post(url, json=body, headers=headers) as response:
        lines = [line async for line in response.content if line.startswith(b"data: ")]
    whole = bool(lines) and lines[-1].strip() == b"data: [DONE]"
    last = {} if whole or not lines else json.loads(lines[-1][6:])
    return {"call": number, "whole": whole, "error": (last.get("error") or {}).get("code")}


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 512)
        except OSError:
            pass


if __name__ == "__main__":
    where = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), where))
