"""Asks an inference server what training needs to know of it, through the calls that the gateway makes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any

from hpcroll.contract import Sampling
from hpcroll.errors import ModelError
from hpcroll.gateway.engines.chat import ChatEngine
from hpcroll.gateway.reply import ReplyReader
from hpcroll.report.finding import Finding, Level

_TIMEOUT_S = 120.0
_PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=16)
_PROMPT = [{"role": "user", "content": "Count from one to twenty."}]
_TOP = 5
_SAME = 1e-3
"""Log-probabilities this close are of one distribution: engines are not deterministic to the last bit."""


def check_endpoint(url: str, model: str) -> Iterator[Finding]:
    """Findings on the server at base URL `url`, which serves `model`."""
    area = f"endpoint {url}"
    server = _Server(url, model)
    try:
        reply = server.ask(_PLAIN)
    except ModelError as error:
        yield Finding(area, Level.ERROR, str(error), "check the URL and --model")
        return
    yield from _tokens(area, reply)
    yield from _version(area, reply)
    for check in (_lengths, _streaming, _temperature):
        try:
            yield from check(area, server)
        except ModelError as error:
            yield Finding(area, Level.ERROR, f"{check.__name__.strip('_')}: {error}")


class _Server:
    def __init__(self, url: str, model: str) -> None:
        self._url = f"{url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        self._model = model
        self.last: dict[str, Any] = {}

    def ask(self, sampling: Sampling, **fields: Any) -> ReplyReader:
        """The reply to one call; raises `ModelError` in the server's own words."""
        body = {
            "model": self._model,
            "messages": _PROMPT,
            "logprobs": True,
            "return_token_ids": True,
            **sampling.model_dump(exclude_none=True),
            **fields,
        }
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        reader, reading = ReplyReader(), ChatEngine().reading(stream=bool(fields.get("stream")))
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                reader.take_headers(response.headers)
                for data in _events(response) if fields.get("stream") else (json.load(response),):
                    self.last = data
                    reader.take(reading.take(data))
        except urllib.error.HTTPError as error:
            raise ModelError(f"answered {error.code}: {error.read(500).decode(errors='replace')}") from error
        except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"gave no usable answer: {type(error).__name__}: {error}") from error
        return reader


def _events(response: Any) -> Iterator[dict[str, Any]]:
    for line in response:
        text = line.decode("utf-8").strip()
        if text.startswith("data:") and text != "data: [DONE]":
            yield json.loads(text.removeprefix("data:"))


def _tokens(area: str, reply: ReplyReader) -> Iterator[Finding]:
    try:
        reply.check("the server")
    except ModelError as error:
        yield Finding(area, Level.ERROR, str(error), "without them its tokens cannot be trained on")
        return
    tokens = reply.tokens()
    text = (
        f"{len(tokens.prompt_ids)} prompt ids, {len(tokens.sampled_ids)} token ids, as many "
        f"log-probabilities (of kind {reply.logprob_kind}), finish reason {reply.finish_reason}"
    )
    yield Finding(area, Level.OK, text)


def _version(area: str, reply: ReplyReader) -> Iterator[Finding]:
    if reply.versions:
        yield Finding(area, Level.OK, f"names policy version {reply.versions[-1]}")
        return
    yield Finding(
        area,
        Level.WARNING,
        "names no policy version",
        "versions then come from the registry: a range around each publication (low < high)",
    )


def _lengths(area: str, server: _Server) -> Iterator[Finding]:
    count = len(server.ask(_PLAIN.model_copy(update={"max_tokens": 3})).tokens().sampled_ids)
    if count <= 3:
        yield Finding(area, Level.OK, f"max_tokens is honoured ({count} of at most 3 tokens)")
    else:
        yield Finding(area, Level.ERROR, f"max_tokens=3 gave {count} tokens", "token limits cannot be kept")


def _streaming(area: str, server: _Server) -> Iterator[Finding]:
    reply = server.ask(_PLAIN, stream=True, stream_options={"include_usage": True})
    try:
        reply.check("the server, streaming,")
    except ModelError as error:
        yield Finding(area, Level.ERROR, str(error), "agents that stream could not be trained on")
        return
    yield Finding(area, Level.OK, "streaming replies carry ids and log-probabilities, too")


def _temperature(area: str, server: _Server) -> Iterator[Finding]:
    """Of which distribution log-probabilities are: that of temperature 1, or the one sampled from."""
    plain = _first_token(server, temperature=1.0)
    sharp = _first_token(server, temperature=0.5)
    shared = plain.keys() & sharp.keys()
    if len(shared) < 2:
        yield Finding(
            area,
            Level.WARNING,
            "returns no top_logprobs: of which distribution its log-probabilities are cannot be told",
            "sample at temperature 1 and top_p 1, where there is no difference",
        )
        return
    if all(abs(plain[token] - sharp[token]) < _SAME for token in shared):
        yield Finding(
            area,
            Level.WARNING,
            "log-probabilities are those of temperature 1, whatever the temperature",
            "sample at temperature 1 and top_p 1; calls that do not are marked as not trainable",
        )
        return
    yield Finding(area, Level.OK, "temperature is honoured, log-probabilities follow it")


def _first_token(server: _Server, *, temperature: float) -> dict[str, float]:
    """Log-probabilities of the likeliest first tokens."""
    sampling = _PLAIN.model_copy(update={"temperature": temperature, "max_tokens": 1})
    server.ask(sampling, top_logprobs=_TOP)
    choices = server.last.get("choices") or [{}]
    content = (choices[0].get("logprobs") or {}).get("content") or [{}]
    return {str(item["token"]): float(item["logprob"]) for item in content[0].get("top_logprobs") or ()}
