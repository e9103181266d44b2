"""What doctor says of a server, for servers that lack what training needs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hpcroll.config import RunConfig
from hpcroll.report import Level, examine
from hpcroll.report.endpoint_check import check_endpoint

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def reply(request: dict[str, Any], **choice: Any) -> dict[str, Any]:
    """A Chat Completions reply with everything training needs; `choice` overrules fields of its choice."""
    count = min(int(request.get("max_tokens", 16)), 16)
    top = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]
    whole = {
        "index": 0,
        "message": {"role": "assistant", "content": "x" * count},
        "token_ids": list(range(count)),
        "logprobs": {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": top}] * count},
        "finish_reason": "length",
        **choice,
    }
    return {"choices": [whole], "prompt_token_ids": [1, 2, 3], "usage": {"completion_tokens": count}}


@pytest.fixture
def server() -> Iterator[Callable[[Answer], str]]:
    """Serves `answer` for every POST; streams it as one event where asked to."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                body = json.dumps(answer(request)).encode()
                self.send_response(200)
                self.end_headers()
                body = b"data: " + body + b"\n\ndata: [DONE]\n\n" if request.get("stream") else body
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        servers.append(made)
        return f"http://127.0.0.1:{made.server_port}"

    yield start
    for made in servers:
        made.shutdown()
        made.server_close()


def findings(url: str) -> dict[Level, str]:
    """The findings' texts by level, joined."""
    found: dict[Level, str] = dict.fromkeys(Level, "")
    for finding in check_endpoint(url, "policy"):
        found[finding.level] += f"{finding.text}\n"
    return found


def test_complete_server_has_no_errors(server: Callable[[Answer], str]) -> None:
    found = findings(server(reply))
    assert found[Level.ERROR] == ""
    assert "3 prompt ids, 16 token ids" in found[Level.OK]
    assert "max_tokens is honoured" in found[Level.OK]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"token_ids": None}, "no token_ids"),
        ({"logprobs": None}, "0 log-probabilities for 16 token_ids"),
        ({"finish_reason": None}, "no finish_reason"),
    ],
)
def test_server_without_what_training_needs_is_an_error_that_says_what(
    server: Callable[[Answer], str], choice: dict[str, Any], words: str
) -> None:
    assert words in findings(server(lambda request: reply(request, **choice)))[Level.ERROR]


def test_server_that_hides_prompt_ids_is_an_error(server: Callable[[Answer], str]) -> None:
    url = server(lambda request: {**reply(request), "prompt_token_ids": None})
    assert "no prompt_token_ids" in findings(url)[Level.ERROR]


def test_ignored_token_limit_is_an_error(server: Callable[[Answer], str]) -> None:
    assert "max_tokens=3 gave 16" in findings(server(lambda request: reply({"model": "x"})))[Level.ERROR]


def test_log_probabilities_that_ignore_the_temperature_are_a_warning(
    server: Callable[[Answer], str],
) -> None:
    def sharpened(request: dict[str, Any]) -> dict[str, Any]:
        answer = reply(request)
        for entry in answer["choices"][0]["logprobs"]["content"]:
            entry["top_logprobs"] = [
                {**top, "logprob": top["logprob"] / request["temperature"]} for top in entry["top_logprobs"]
            ]
        return answer

    assert "those of temperature 1, whatever" in findings(server(reply))[Level.WARNING]
    honest = findings(server(sharpened))
    assert "log-probabilities follow it" in honest[Level.OK]
    assert "temperature" not in honest[Level.WARNING]


def test_named_policy_version_is_told_from_none(server: Callable[[Answer], str]) -> None:
    assert "names no policy version" in findings(server(reply))[Level.WARNING]
    named = findings(server(lambda request: {**reply(request), "weight_version": "7"}))
    assert "names policy version 7" in named[Level.OK]


def test_dead_and_confused_servers_are_errors_not_crashes(server: Callable[[Answer], str]) -> None:
    assert "no usable answer" in findings("http://127.0.0.1:9")[Level.ERROR]
    assert findings(server(lambda request: {"choices": "nonsense"}))[Level.ERROR]


def test_scripted_policy_server_passes(serve_scripts: Callable[..., str]) -> None:
    found = findings(serve_scripts([]))
    assert found[Level.ERROR] == ""
    assert "names policy version 0" in found[Level.OK]


def test_host_is_examined_and_missing_things_say_what_to_do(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {"sandbox": {"name": "bwrap", "image": "host"}, "launch": {"launcher": "local"}}
    )
    found = examine(tmp_path / "not" / "there", config=config)
    areas = {finding.area for finding in found}
    assert {"python", "file system", "scratch", "sandbox bwrap (configured)", "slurm"} <= areas
    assert not [finding for finding in found if finding.area == "file system" and finding.is_error]
    missing = config.sandbox.model_copy(update={"scratch": tmp_path / "absent"})
    found = examine(tmp_path, config=config.model_copy(update={"sandbox": missing}))
    (scratch,) = [finding for finding in found if finding.area == "scratch"]
    assert scratch.is_error
    assert scratch.advice == "set sandbox.scratch"
