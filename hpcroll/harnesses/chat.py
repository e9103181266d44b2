"""The model as a harness calls it: OpenAI Chat Completions at the gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp

from hpcroll.contract import StopReason
from hpcroll.errors import HarnessError, ModelError, SpoolError
from hpcroll.gateway import NOT_RECORDED_CODE, ModelEndpoint, limit_of


class LimitReachedError(Exception):
    """The gateway refused a call because the rollout met a limit."""

    def __init__(self, limit: StopReason) -> None:
        super().__init__(limit.value)
        self.limit = limit


class ChatClient:
    """One conversation's connection, as an async context manager."""

    def __init__(self, endpoint: ModelEndpoint, *, tools: Sequence[Mapping[str, Any]]) -> None:
        self._endpoint = endpoint
        self._tools = list(tools)
        self._client: aiohttp.ClientSession | None = None
        self.calls = 0
        """Replies received."""

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self._endpoint.api_key}"}
        # No deadline of its own: the gateway has one for the call, the worker one for the stage.
        timeout = aiohttp.ClientTimeout(total=None)
        self._client = aiohttp.ClientSession(headers=headers, timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()

    async def complete(self, messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], str | None]:
        """The next assistant message and its finish reason.

        Raises `LimitReachedError` for a limit of the rollout, `ModelError` where the gateway gave up on
        the inference side or cannot be reached, `SpoolError` where it could not journal the reply,
        `HarnessError` where it refuses the request itself.
        """
        assert self._client is not None, "use it as a context manager"
        body = {"model": self._endpoint.model, "messages": list(messages), "tools": self._tools}
        url = f"{self._endpoint.base_url}/chat/completions"
        try:
            async with self._client.post(url, json=body) as response:
                data: Any = await response.json(content_type=None)
                status = response.status
        except (aiohttp.ClientError, ValueError) as error:
            raise ModelError(
                f"the gateway at {url} gave no answer: {type(error).__name__}: {error}"
            ) from error
        if status != 200:
            raise _failure(status, data)
        self.calls += 1
        choice = data["choices"][0]
        return choice["message"], choice.get("finish_reason")


def _failure(status: int, data: Any) -> Exception:
    error = data.get("error") if isinstance(data, dict) else None
    error = error if isinstance(error, dict) else {}
    limit = limit_of(error.get("code"))
    if limit is not None:
        return LimitReachedError(limit)
    message = f"the gateway answered {status}: {error.get('message', 'no reason given')}"
    if error.get("code") == NOT_RECORDED_CODE:
        return SpoolError(message)
    return ModelError(message) if status >= 500 else HarnessError(message)
