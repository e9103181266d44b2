"""The inference servers: which one gets a call, and what is tried again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic_core import from_json

from hpcroll.config import ModelConfig
from hpcroll.errors import ConfigError, ModelError
from hpcroll.gateway.balance import Balance
from hpcroll.gateway.health import Health, HealthRules
from hpcroll.policy import DEFAULT_KIND

CHAT_PATH = "/v1/chat/completions"
HEALTH_PATH = "/health"
_BUSY = 429
_AWAY = frozenset({502, 503, 504})
_ERROR = 500
_FIRST_DELAY_S = 0.5
_DELAY_FACTOR = 4
_LONGEST_DELAY_S = 30.0
"""Four tries wait about 10 s in all, six over a minute: an engine that reloads its weights."""
_LONGEST_RETRY_AFTER_S = 30.0
_WATCH_S = 1.0


@dataclass(frozen=True, slots=True)
class Upstream:
    """One inference server."""

    base_url: str
    """With or without `/v1`."""
    kind: str = DEFAULT_KIND
    """The engine whose API it speaks: `vllm` or `sglang`."""
    served_name: str | None = None
    """Model name that it expects; None where the config's counts."""
    version: int | None = None
    """The policy version that it serves for good; None where it follows the registry."""

    @property
    def root(self) -> str:
        """The base URL without `/v1`: what tells servers apart."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")

    def url(self, path: str) -> str:
        """The URL of `path`, which begins with a slash, `/v1` included."""
        return f"{self.root}{path}"


Ask = Callable[[Upstream], tuple[str, bytes]]
"""The path and the body of a request, as a server of that kind and name expects them."""


class UpstreamRefusal(Exception):
    """A server understood the call and refused it: trying again changes nothing."""

    def __init__(self, upstream: Upstream, status: int, message: str, code: object) -> None:
        super().__init__(f"{upstream.base_url} answered {status}: {message}")
        self.upstream = upstream
        self.status = status
        self.message = message
        self.code = code


class Accepted:
    """A server's answer with status 200, not read yet; release it."""

    def __init__(
        self, upstream: Upstream, response: aiohttp.ClientResponse, done: Callable[[], None]
    ) -> None:
        self.upstream = upstream
        self.response = response
        self.accepted_at = time.monotonic()
        self._done: Callable[[], None] | None = done

    def release(self) -> None:
        """Gives the connection back, or drops it (and with it the generation) where it was not read."""
        if not self.response.content.is_eof():
            self.response.close()
        self.response.release()
        done, self._done = self._done, None
        if done is not None:
            done()


@dataclass(slots=True, eq=False)
class _Flight:
    """A call that went to a server and is not over."""

    server: str
    scope: asyncio.Timeout
    """Ends the wait for an answer."""
    moved_at: float
    """Monotonic time of its last byte, or of its start."""
    response: aiohttp.ClientResponse | None = None
    seen_bytes: int = 0

    def give_up(self) -> None:
        """Ends it as a failure of the connection."""
        if self.response is not None:
            self.response.close()
        elif not self.scope.expired():
            self.scope.reschedule(asyncio.get_running_loop().time())


class UpstreamPool:
    """Sends calls to the servers that are there now: the session's own, else the least loaded.

    `listing` gives the registered servers; it is called for every try, so that a server counts from the
    moment at which it is listed and no longer.
    """

    def __init__(
        self,
        config: ModelConfig,
        listing: Callable[[], Sequence[Upstream]],
        *,
        rules: HealthRules | None = None,
    ) -> None:
        self._config = config
        self._listing = listing
        self._rules = rules or HealthRules()
        self._balance = Balance()
        self._health = Health(self._rules)
        self._flights: set[_Flight] = set()
        self._asked_at: dict[str, float] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._client: aiohttp.ClientSession | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises `ConfigError` where the API key's environment variable is not set."""
        headers = {}
        if (name := self._config.api_key_env) is not None:
            key = os.environ.get(name)
            if not key:
                raise ConfigError(f"model.api_key_env: the environment variable {name} is not set")
            headers["Authorization"] = f"Bearer {key}"
        # The call's own deadline is the only one; a slow first token is not a failure.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        connector = aiohttp.TCPConnector(limit=0)
        # A balancer's cookie would send every session to one server.
        self._client = aiohttp.ClientSession(
            headers=headers, timeout=timeout, connector=connector, cookie_jar=aiohttp.DummyCookieJar()
        )
        self._watch = asyncio.create_task(self._keep_watch())

    async def close(self) -> None:
        """Drops every connection; idempotent."""
        for task in (self._watch, *list(self._probes.values())):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if self._client is not None:
            await self._client.close()

    def forget(self, session: str) -> None:
        """Drops the affinity of a session that has ended."""
        self._balance.forget(session)

    async def send(self, ask: bytes | Ask, *, session: str) -> Accepted:
        """The answer of the first server that accepts the call.

        `ask` gives the request's path and body for the server that is tried; bytes are the body of a
        Chat Completions request. Connections that fail before an answer began and the statuses 429, 500,
        502, 503 and 504 are tried again, since sampling has no side effect: at once on a server that was
        not tried yet, else after a pause. Raises `UpstreamRefusal` for a refusal, `ModelError` after
        `call_tries` tries.
        """
        failed: dict[str, str] = {}
        for number in range(self._config.call_tries):
            pause_s = min(_FIRST_DELAY_S * _DELAY_FACTOR**number, _LONGEST_DELAY_S) * random.uniform(0.5, 1.0)
            upstream = self._choose(session, failed)
            if upstream is None:
                failed[""] = f"no inference server is registered for policy {self._config.name}"
            else:
                path, body = (CHAT_PATH, ask) if isinstance(ask, bytes) else ask(upstream)
                try:
                    return await self._try(upstream, path, body, session)
                except _Unavailable as error:
                    failed[upstream.root] = str(error)
                    pause_s = max(pause_s, error.retry_after_s)
            untried = any(upstream.root not in failed for upstream in self._listed())
            if number + 1 < self._config.call_tries and not untried:
                await asyncio.sleep(pause_s)
        raise ModelError(
            f"no inference server answered in {self._config.call_tries} tries: {'; '.join(failed.values())}"
        )

    def _listed(self) -> list[Upstream]:
        named = (Upstream(url, kind=self._config.engine) for url in self._config.endpoints)
        listed = [*named, *self._listing()]
        return list({upstream.root: upstream for upstream in listed}.values())

    def _choose(self, session: str, failed: Mapping[str, str]) -> Upstream | None:
        every = {upstream.root: upstream for upstream in self._listed()}
        untried = [root for root in every if root not in failed]
        # One that is aside is better than one that this very call has failed at, and that than none.
        usable = [root for root in untried if self._health.is_usable(root)]
        chosen = self._balance.choose(session, usable or untried or list(every))
        return None if chosen is None else every[chosen]

    async def _try(self, upstream: Upstream, path: str, body: bytes, session: str) -> Accepted:
        assert self._client is not None, "start() comes first"
        server = upstream.root
        kept = False
        began = time.monotonic()
        scope = asyncio.timeout(None)
        flight = _Flight(server, scope, began)
        self._balance.begin(server)
        self._flights.add(flight)
        try:
            headers = {"Content-Type": "application/json", "X-Session-Id": session}
            async with scope:
                response = await self._client.post(upstream.url(path), data=body, headers=headers)
                flight.response, flight.moved_at = response, time.monotonic()
            if response.status == 200:
                self._health.succeed(server)
                # The affinity pays only where the server has the prefix: set once it took a call.
                self._balance.settle(session, server)
                kept = True
                return Accepted(upstream, response, lambda: self._end(flight))
            async with response:
                raise self._failure(upstream, response, await response.read())
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            self._put_aside(server)
            raise _Unavailable(f"{upstream.base_url}: {type(error).__name__}: {error}") from error
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise _Unavailable(f"{upstream.base_url} took the call and then hung") from error
        except asyncio.CancelledError:
            # Given up from outside. Where nothing came of any call for so long, others should not wait too.
            if self._quiet_s(server) >= self._rules.quiet_s:
                self._put_aside(server)
            raise
        finally:
            if not kept:
                self._end(flight)

    def _end(self, flight: _Flight) -> None:
        self._flights.discard(flight)
        self._balance.end(flight.server)

    def _failure(self, upstream: Upstream, response: aiohttp.ClientResponse, data: bytes) -> Exception:
        message, code = _read_error(data)
        after_s = _seconds(response.headers)
        if response.status == _BUSY:
            self._health.busy(upstream.root, after_s)
        elif response.status in _AWAY:
            self._put_aside(upstream.root)
        elif response.status == _ERROR:
            if self._health.err(upstream.root):
                self._balance.evict(upstream.root)
        else:
            return UpstreamRefusal(upstream, response.status, message, code)
        return _Unavailable(f"{upstream.base_url} answered {response.status}: {message}", after_s)

    def _put_aside(self, server: str) -> None:
        self._health.fail(server)
        self._balance.evict(server)

    async def _keep_watch(self) -> None:
        """Asks servers that are aside whether they are back, and quiet ones whether they live."""
        while True:
            await asyncio.sleep(min(_WATCH_S, self._rules.quiet_s))
            listed = {upstream.root: upstream for upstream in self._listed()}
            known = {*listed, *(flight.server for flight in self._flights)}
            self._health.keep(known)
            self._asked_at = {server: at for server, at in self._asked_at.items() if server in known}
            for server, upstream in listed.items():
                if server in self._probes:
                    continue
                if self._health.probe_is_due(server) or self._quiet_s(server) >= self._rules.quiet_s:
                    self._probes[server] = asyncio.create_task(self._probe(upstream))

    def _quiet_s(self, server: str) -> float:
        """Seconds since anything came of any of the server's calls or probes; 0 where it has no call."""
        now = time.monotonic()
        moved = [self._asked_at.get(server, 0.0)]
        flights = [flight for flight in self._flights if flight.server == server]
        for flight in flights:
            if flight.response is not None and flight.response.content.total_bytes != flight.seen_bytes:
                flight.seen_bytes, flight.moved_at = flight.response.content.total_bytes, now
            moved.append(flight.moved_at)
        return now - max(moved) if flights else 0.0

    async def _probe(self, upstream: Upstream) -> None:
        server = upstream.root
        try:
            alive = await self._lives(upstream)
        finally:
            del self._probes[server]
        if alive:
            self._asked_at[server] = time.monotonic()
            self._health.answered(server)
        elif self._health.unanswered(server):
            self._balance.evict(server)
            if self._quiet_s(server) >= self._rules.quiet_s:
                for flight in [flight for flight in self._flights if flight.server == server]:
                    flight.give_up()

    async def _lives(self, upstream: Upstream) -> bool:
        assert self._client is not None, "start() comes first"
        try:
            async with (
                asyncio.timeout(self._rules.probe_timeout_s),
                self._client.get(upstream.url(HEALTH_PATH)) as response,
            ):
                # A server without this path says so, and lives.
                return response.status < _ERROR
        except (aiohttp.ClientError, TimeoutError):
            return False


class _Unavailable(Exception):
    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def _read_error(data: bytes) -> tuple[str, object]:
    text = data.decode("utf-8", errors="replace")[:2000]
    try:
        parsed: Any = from_json(data)
    except ValueError:
        return text or "no reason given", None
    # vLLM and OpenAI nest the error, SGLang does not.
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else None
    if not isinstance(error, dict):
        return text, None
    return str(error.get("message", text)), error.get("code")


def _seconds(headers: Mapping[str, str]) -> float:
    try:
        return min(float(headers.get("Retry-After", "0")), _LONGEST_RETRY_AFTER_S)
    except ValueError:
        return 0.0
