"""The inference servers: which one gets a call, and what is tried again."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic_core import from_json

from hpcroll.config import ModelConfig
from hpcroll.errors import ConfigError, ModelError

_TRY_AGAIN = frozenset({429, 502, 503, 504})
_FIRST_DELAY_S = 0.5
_DELAY_FACTOR = 4
_LONGEST_DELAY_S = 30.0
"""Four tries wait about 10 s in all, six over a minute: an engine that reloads its weights."""
_LONGEST_RETRY_AFTER_S = 30.0


@dataclass(frozen=True, slots=True)
class Upstream:
    """One inference server."""

    base_url: str
    """With or without `/v1`."""

    @property
    def chat_url(self) -> str:
        return f"{self.base_url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"


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
        self._done = done

    def release(self) -> None:
        """Gives the connection back, or drops it (and with it the generation) where it was not read."""
        if not self.response.content.is_eof():
            self.response.close()
        self.response.release()
        self._done()


class UpstreamPool:
    """Sends calls to the servers that are there now: the session's own, else the least busy."""

    def __init__(self, config: ModelConfig, listing: Callable[[], Sequence[Upstream]]) -> None:
        self._config = config
        self._listing = listing
        self._outstanding: Counter[str] = Counter()
        self._affinity: dict[str, str] = {}
        self._client: aiohttp.ClientSession | None = None

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
        self._client = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def forget(self, session: str) -> None:
        """Drops the affinity of a session that has ended."""
        self._affinity.pop(session, None)

    async def send(self, body: bytes, *, session: str) -> Accepted:
        """The answer of the first server that accepts the call.

        Connections that fail before an answer began and the statuses 429, 502, 503 and 504 are tried
        again, since sampling has no side effect: at once on a server that was not tried yet, else after
        a pause. Raises `UpstreamRefusal` for a refusal, `ModelError` after `call_tries` tries.
        """
        failed: dict[str, str] = {}
        for number in range(self._config.call_tries):
            pause_s = min(_FIRST_DELAY_S * _DELAY_FACTOR**number, _LONGEST_DELAY_S) * random.uniform(0.5, 1.0)
            upstream = self._choose(session, failed)
            if upstream is None:
                failed[""] = f"no inference server is registered for policy {self._config.name}"
            else:
                try:
                    return await self._try(upstream, body, session)
                except _Unavailable as error:
                    failed[upstream.chat_url] = str(error)
                    pause_s = max(pause_s, error.retry_after_s)
            untried = any(upstream.chat_url not in failed for upstream in self._listed())
            if number + 1 < self._config.call_tries and not untried:
                await asyncio.sleep(pause_s)
        raise ModelError(
            f"no inference server answered in {self._config.call_tries} tries: {'; '.join(failed.values())}"
        )

    def _listed(self) -> list[Upstream]:
        listed = [*map(Upstream, self._config.endpoints), *self._listing()]
        return list({upstream.chat_url: upstream for upstream in listed}.values())

    def _choose(self, session: str, failed: Mapping[str, str]) -> Upstream | None:
        every = self._listed()
        healthy = [upstream for upstream in every if upstream.chat_url not in failed]
        candidates = healthy or every
        mine = self._affinity.get(session)
        for upstream in candidates:
            if upstream.base_url == mine:
                return upstream
        return min(candidates, key=lambda item: self._outstanding[item.base_url], default=None)

    async def _try(self, upstream: Upstream, body: bytes, session: str) -> Accepted:
        assert self._client is not None, "start() comes first"
        url = upstream.base_url
        self._outstanding[url] += 1
        kept = False
        try:
            headers = {"Content-Type": "application/json", "X-Session-Id": session}
            response = await self._client.post(upstream.chat_url, data=body, headers=headers)
            if response.status == 200:
                # The affinity pays only where the server has the prefix: set once it took a call.
                self._affinity[session] = url
                kept = True
                return Accepted(upstream, response, lambda: self._release(url))
            async with response:
                raise _failure(upstream, response, await response.read())
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _Unavailable(f"{url}: {type(error).__name__}: {error}") from error
        finally:
            if not kept:
                self._release(url)

    def _release(self, url: str) -> None:
        self._outstanding[url] -= 1


class _Unavailable(Exception):
    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def _failure(upstream: Upstream, response: aiohttp.ClientResponse, data: bytes) -> Exception:
    message, code = _read_error(data)
    if response.status in _TRY_AGAIN:
        after = _seconds(response.headers)
        return _Unavailable(f"{upstream.base_url} answered {response.status}: {message}", after)
    return UpstreamRefusal(upstream, response.status, message, code)


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
