"""The pool leaves servers in trouble alone, moves their sessions, and takes them back once they are well."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from hpcroll.config import ModelConfig
from hpcroll.errors import ModelError
from hpcroll.gateway.health import Health, HealthRules
from hpcroll.gateway.upstream import Accepted, Upstream, UpstreamPool, UpstreamRefusal
from hpcroll.testing.harness_suite import until
from tests.serving import serving

QUICK = HealthRules(first_aside_s=0.05, longest_aside_s=0.2, quiet_s=0.3, probe_timeout_s=0.3)


@dataclass
class Server:
    """An inference server of one kind of mood at a time."""

    mood: str = "well"
    url: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    probes: int = 0
    gone: int = 0
    """Calls whose client left before they were answered."""
    hold: asyncio.Event = field(default_factory=asyncio.Event)

    def sessions(self) -> list[str]:
        return [session for session, _ in self.calls]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        mood = self.mood
        body = await request.json()
        self.calls.append((request.headers["X-Session-Id"], {**body, "path": request.path}))
        if mood.isdecimal():
            return web.json_response({"error": {"message": mood}}, status=int(mood))
        if mood == "closes":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if mood in ("hangs", "holds"):
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.gone += 1
                raise
        if mood == "begins":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"a")
            await self.hold.wait()
            return response
        return web.json_response({"ok": True})

    async def health(self, request: web.Request) -> web.StreamResponse:
        self.probes += 1
        if self.mood == "hangs":
            await self.hold.wait()
        return web.Response(status=503 if self.mood == "503" else 200)


@asynccontextmanager
async def server(mood: str = "well") -> AsyncIterator[Server]:
    it = Server(mood)
    async with serving(web.post("/{path:.*}", it.chat), web.get("/health", it.health)) as it.url:
        try:
            yield it
        finally:
            it.hold.set()


@asynccontextmanager
async def pool(
    listed: list[Upstream], *, rules: HealthRules = QUICK, **config: Any
) -> AsyncIterator[UpstreamPool]:
    it = UpstreamPool(ModelConfig.model_validate(config), lambda: listed, rules=rules)
    await it.start()
    try:
        yield it
    finally:
        await it.close()


async def call(pool: UpstreamPool, session: str) -> str:
    """One call, read to its end; the root of the server that answered."""
    accepted = await pool.send(b"{}", session=session)
    try:
        await accepted.response.read()
    finally:
        accepted.release()
    return accepted.upstream.root


def at_home(pool: UpstreamPool, server: Server) -> int:
    return pool._balance.sessions(server.url)


def load(pool: UpstreamPool, *servers: Server) -> int:
    return sum(pool._balance.load(server.url) for server in servers)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(within())


async def settle(pool: UpstreamPool, server: Server, count: int) -> list[str]:
    """Names of `count` sessions that are at home at `server`."""
    names: list[str] = []
    others: list[str] = []
    while len(names) < count:
        name = f"{secrets.token_hex(4)}.1"
        (names if await call(pool, name) == server.url else others).append(name)
    for name in others:
        pool.forget(name)
    return names


@pytest.mark.parametrize("mood", ["502", "503", "504", "closes"])
def test_server_that_is_away_loses_its_sessions_and_gets_no_call_until_it_is_well(mood: str) -> None:
    async def scenario() -> None:
        async with server() as one, server() as two, pool([Upstream(one.url), Upstream(two.url)]) as it:
            names = await settle(it, one, 3)
            one.mood = mood
            one.calls.clear()
            assert await call(it, names[0]) == two.url
            assert at_home(it, one) == 0
            # The others are not sent there to find out for themselves.
            assert [await call(it, name) for name in names[1:]] == [two.url, two.url]
            assert len(one.calls) == 1
            one.mood = "well"
            await until(lambda: it._health.is_usable(one.url))
            await settle(it, one, 1)
            for name in names:
                it.forget(name)

    run(scenario)


def test_refused_connection_puts_a_server_aside_until_its_port_answers() -> None:
    async def scenario() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            dead = f"http://127.0.0.1:{unused.getsockname()[1]}"
            async with server() as well, pool([Upstream(dead), Upstream(well.url)]) as it:
                assert {await call(it, f"s{number}") for number in range(10)} == {well.url}
                assert not it._health.is_usable(dead)
                assert it._balance.load(dead) == 0

    run(scenario)


def test_probes_of_a_server_that_stays_away_grow_rarer() -> None:
    now = [0.0]
    health = Health(HealthRules(first_aside_s=1.0, longest_aside_s=60.0), clock=lambda: now[0])
    health.fail("a")
    health.fail("a")  # the same outage, met by another call
    asked = []
    while now[0] < 400:
        now[0] += 0.5
        if health.probe_is_due("a"):
            asked.append(now[0])
            assert health.unanswered("a")
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert asked[0] == 1.0
    assert gaps == [2, 4, 8, 16, 32, 60, 60, 60, 60, 60]
    health.answered("a")
    assert health.is_usable("a")
    health.fail("a")
    now[0] += 59
    assert not health.probe_is_due("a"), "it is back, and not yet trusted"
    health.succeed("a")
    health.fail("a")
    now[0] += 1
    assert health.probe_is_due("a")


def test_one_poisonous_request_does_not_put_servers_aside_and_a_broken_engine_is() -> None:
    async def scenario() -> None:
        async with server("500") as one, server() as two, pool([Upstream(one.url), Upstream(two.url)]) as it:
            number = 0
            while len(one.calls) < 2:
                assert await call(it, f"s{number}.1") == two.url, "tried again elsewhere"
                it.forget(f"s{number}.1")
                number += 1
                assert it._health.is_usable(one.url)
            while len(one.calls) < 3:
                await call(it, f"s{number}.1")
                it.forget(f"s{number}.1")
                number += 1
            assert not it._health.is_usable(one.url)

    run(scenario)


def test_busy_server_is_left_alone_for_as_long_as_it_says() -> None:
    now = [0.0]
    health = Health(HealthRules(), clock=lambda: now[0])
    health.busy("a", 7.0)
    now[0] = 6.9
    assert not health.is_usable("a")
    assert not health.probe_is_due("a")
    now[0] = 7.0
    assert health.is_usable("a")


def test_hung_server_is_found_out_and_its_calls_are_answered_elsewhere() -> None:
    async def scenario() -> None:
        async with server() as one, server() as two, pool([Upstream(one.url), Upstream(two.url)]) as it:
            names = await settle(it, one, 3)
            one.mood = "hangs"
            answers = await asyncio.gather(*(call(it, name) for name in names))
            assert answers == [two.url] * 3
            assert one.gone == 3, "the hung calls were given up"
            assert at_home(it, one) == 0
            assert not it._health.is_usable(one.url)
            assert load(it, one) == 0

    run(scenario)


def test_slow_server_that_answers_probes_keeps_its_calls() -> None:
    async def scenario() -> None:
        async with server() as one, server() as two, pool([Upstream(one.url), Upstream(two.url)]) as it:
            (name,) = await settle(it, one, 1)
            one.mood = "holds"
            waiting = asyncio.ensure_future(call(it, name))
            await until(lambda: one.probes >= 3)
            one.hold.set()
            assert await waiting == one.url
            assert one.gone == 0

    run(scenario)


def test_reply_that_hangs_after_it_began_breaks_off_and_is_not_sent_twice() -> None:
    async def scenario() -> None:
        async with server() as one, pool([Upstream(one.url)]) as it:
            one.mood = "begins"
            accepted = await it.send(b"{}", session="s")
            assert await accepted.response.content.readexactly(1) == b"a"
            one.mood = "hangs"
            with pytest.raises(aiohttp.ClientError):
                await accepted.response.read()
            accepted.release()
            assert len(one.calls) == 1
            assert load(it, one) == 0

    run(scenario)


def test_where_every_server_is_aside_they_are_tried_all_the_same() -> None:
    async def scenario() -> None:
        rules = HealthRules(first_aside_s=1000, longest_aside_s=1000)
        async with server("503") as one, pool([Upstream(one.url)], rules=rules, call_tries=1) as it:
            with pytest.raises(ModelError, match="503"):
                await call(it, "s")
            one.mood = "well"
            assert await call(it, "s") == one.url
            assert it._health.is_usable(one.url)

    run(scenario)


def test_removed_server_gets_no_further_call_and_finishes_what_it_has() -> None:
    async def scenario() -> None:
        async with server() as one, server() as two:
            listed = [Upstream(one.url), Upstream(two.url)]
            async with pool(listed) as it:
                (name,) = await settle(it, one, 1)
                one.mood = "holds"
                waiting = asyncio.ensure_future(call(it, name))
                await until(lambda: len(one.calls) > 0 and it._balance.calls(one.url) == 1)
                del listed[0]
                assert await call(it, name) == two.url
                one.hold.set()
                assert await waiting == one.url

    run(scenario)


def test_added_server_takes_new_sessions_until_it_is_level_and_no_more() -> None:
    async def scenario() -> None:
        async with server() as one, server() as two, server() as three:
            listed = [Upstream(one.url), Upstream(two.url)]
            async with pool(listed) as it:
                for number in range(20):
                    await call(it, f"old{number}")
                assert (at_home(it, one), at_home(it, two)) == (10, 10)
                listed.append(Upstream(three.url))
                for number in range(40):
                    await call(it, f"new{number}")
                assert [at_home(it, each) for each in (one, two, three)] == [20, 20, 20]

    run(scenario)


def test_counts_are_whole_whatever_became_of_a_call() -> None:
    async def scenario() -> None:
        async with server() as one, server() as two, pool([Upstream(one.url), Upstream(two.url)]) as it:
            await call(it, "read")
            accepted = await it.send(b"{}", session="dropped")
            accepted.release()
            accepted.release()
            one.mood = two.mood = "holds"
            left = asyncio.ensure_future(call(it, "left"))
            await until(lambda: load(it, one, two) == 3)
            left.cancel()
            await asyncio.wait({left})
            one.mood = two.mood = "422"
            with pytest.raises(UpstreamRefusal):
                await call(it, "refused")
            for session in ("read", "dropped", "left", "refused"):
                it.forget(session)
            assert load(it, one, two) == 0

    run(scenario)


def test_each_server_is_asked_in_its_own_words() -> None:
    async def scenario() -> None:
        async with server() as one, server() as two:
            listed = [
                Upstream(one.url, served_name="a"),
                Upstream(f"{two.url}/v1/", kind="sglang", served_name="b", version=3),
            ]

            def ask(upstream: Upstream) -> tuple[str, bytes]:
                path = "/generate" if upstream.kind == "sglang" else "/v1/completions"
                return path, json.dumps({"model": upstream.served_name}).encode()

            async with pool(listed) as it:
                taken: list[Accepted] = []
                for number in range(2):
                    taken.append(await it.send(ask, session=f"s{number}"))
                assert {accepted.upstream.version for accepted in taken} == {None, 3}
                for accepted in taken:
                    accepted.release()
            assert [body for _, body in one.calls] == [{"model": "a", "path": "/v1/completions"}]
            assert [body for _, body in two.calls] == [{"model": "b", "path": "/generate"}]

    run(scenario)


def test_server_that_is_configured_and_registered_counts_once_as_it_registered() -> None:
    async def scenario() -> None:
        async with server() as one, pool([Upstream(one.url, version=7)], endpoints=[f"{one.url}/v1"]) as it:
            accepted = await it.send(b"{}", session="s")
            assert accepted.upstream.version == 7
            accepted.release()

    run(scenario)
