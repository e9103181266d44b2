"""A minimal OpenAI-compatible server that says what training needs to know of each reply.

    python -m tiny_grpo.server RUN --port 8000

Chat Completions without streaming, at temperature 1. Replies hold the prompt's and the sampled token ids with
their log-probabilities, as vLLM's do, and name the policy version that sampled them.
"""

from __future__ import annotations

import argparse
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from hpcroll.fs import RunPaths
from hpcroll.policy import PolicyRegistry
from tiny_grpo.engine import Engine, Sample
from tiny_grpo.language import PIECES, read_reply, render_prompt
from tiny_grpo.model import CONTEXT

MODEL = "policy"
_PLAIN = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "n": 1, "stream": False}
"""What a request may ask for, since it is what the server does."""


class Server:
    """The endpoints over an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "owned_by": "tiny_grpo", "max_model_len": CONTEXT}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
            prompt = render_prompt(body["messages"])
            wanted = int(body.get("max_completion_tokens") or body.get("max_tokens") or CONTEXT - len(prompt))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return _refuse(f"the request cannot be read: {type(error).__name__}: {error}")
        for name, value in _PLAIN.items():
            if body.get(name, value) != value:
                return _refuse(f"{name} {body[name]!r} is not supported: only {value} is")
        if len(prompt) + wanted > CONTEXT or wanted < 1:
            # In vLLM's words, from which the gateway reads how much room there is.
            return _refuse(
                f"This model's maximum context length is {CONTEXT} tokens. However, you requested "
                f"{len(prompt) + wanted} tokens ({len(prompt)} in the messages, {wanted} in the completion). "
                "Please reduce the length of the messages or completion."
            )
        sample = await self._engine.sample(prompt, max_tokens=wanted, seed=body.get("seed"))
        return web.json_response(
            _completion(prompt, sample), headers={"X-Policy-Version": str(sample.version)}
        )


def _completion(prompt: list[int], sample: Sample) -> dict[str, Any]:
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    message = read_reply(sample.ids, call_id=request_id)
    finish_reason = sample.finish_reason
    if finish_reason == "stop" and "tool_calls" in message:
        finish_reason = "tool_calls"
    entries = [
        {
            "token": PIECES[token],
            "logprob": logprob,
            "bytes": list(PIECES[token].encode()),
            "top_logprobs": [],
        }
        for token, logprob in zip(sample.ids, sample.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": finish_reason,
        "logprobs": {"content": entries},
        "token_ids": sample.ids,
    }
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sample.ids)}
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {**usage, "total_tokens": sum(usage.values())},
        "prompt_token_ids": prompt,
    }


def _refuse(message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "code": 400}
    return web.json_response({"error": error}, status=400)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads on a model this small only wait for each other
    engine = Engine(PolicyRegistry(RunPaths(options.run_dir)))
    engine.start()
    try:
        web.run_app(Server(engine).application(), host="127.0.0.1", port=options.port, print=None)
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
