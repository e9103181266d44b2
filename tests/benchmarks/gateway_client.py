"""The gateway benchmark's client: the same code for every route to the upstream, and the ways to load it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

import aiohttp

from tests.benchmarks.gateway_conversation import FIRST_WORD, REPLY_TOKENS, TURNS, check_reply, conversation

_PAUSE_S = 0.02
"""After each call of `in_turns`, so that no route works off what it put off while the next is measured."""
_SETTLING_S = 0.5


@dataclass(frozen=True, slots=True)
class Route:
    """A way to the upstream: base URL with `/v1`, and a key for each session."""

    base_url: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one call, to its first token and to the end of its reply."""

    first_s: float
    total_s: float
    counts: bool = True
    """False for one that only helped to make the load."""


@dataclass(frozen=True, slots=True)
class Load:
    """What sessions do beside each other: call, pause, call again."""

    sessions: int
    token_s: float
    """Between the upstream's tokens."""
    first_token_s: float = 0
    """Until the first of them."""
    pause_s: float = 0
    """Mean; each pause is drawn between half and one and a half of it."""
    window_s: float = 0
    """For this long calls begin that count, once as many run as always will."""

    @property
    def call_s(self) -> float:
        """Of a call without any delay."""
        return self.first_token_s + REPLY_TOKENS * self.token_s


async def call(client: aiohttp.ClientSession, route: Route, session: int, turn_index: int) -> Sample:
    """One streamed call; raises where the reply is not the one that the upstream sent."""
    turn, first_word, first_s = conversation()[turn_index], FIRST_WORD.encode(), 0.0
    headers = {"Authorization": f"Bearer {route.keys[session]}", "Content-Type": "application/json"}
    url = f"{route.base_url}/chat/completions"
    parts: list[bytes] = []
    started_s = time.perf_counter()
    async with client.post(url, data=turn.request, headers=headers) as response:
        async for part in response.content.iter_any():
            parts.append(part)
            if not first_s and first_word in part:
                first_s = time.perf_counter() - started_s
    total_s = time.perf_counter() - started_s
    if response.status != 200:
        raise RuntimeError(f"{url} answered {response.status}: {b''.join(parts)!r:.500}")
    check_reply(turn, b"".join(parts))
    return Sample(first_s, total_s)


async def in_turns(
    client: aiohttp.ClientSession, routes: Mapping[str, Route], calls: int
) -> dict[str, list[Sample]]:
    """One session: every call goes over each route once, in an order that rotates."""
    samples: dict[str, list[Sample]] = {name: [] for name in routes}
    order = list(routes.items())
    for number in range(calls):
        for name, route in order:
            samples[name].append(await call(client, route, 0, number % TURNS))
            await asyncio.sleep(_PAUSE_S)
        order.append(order.pop(0))
    return samples


async def at_once(client: aiohttp.ClientSession, route: Route, load: Load, *, seed: int) -> list[Sample]:
    """The calls of sessions that run beside each other."""
    counting_s = time.perf_counter() + load.call_s + _SETTLING_S
    until_s = counting_s + load.window_s

    async def session(number: int) -> list[Sample]:
        random = Random(f"{seed} {number}")
        turn_index = random.randrange(TURNS)
        samples: list[Sample] = []
        pause_s = random.uniform(0, load.call_s + load.pause_s)
        while (starts_s := time.perf_counter() + pause_s) < until_s:
            await asyncio.sleep(pause_s)
            made = await call(client, route, number, turn_index)
            samples.append(Sample(made.first_s, made.total_s, starts_s >= counting_s))
            turn_index = (turn_index + 1) % TURNS
            pause_s = load.pause_s * random.uniform(0.5, 1.5)
        return samples

    return list(itertools.chain.from_iterable(await asyncio.gather(*map(session, range(load.sessions)))))
