"""`hpcroll endpoint`: a server is registered while it is ready, and gone when it is stopped."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hpcroll.api import Run
from hpcroll.api.engine_probe import EngineIdentity, identify, is_ready, listens

SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        folder, name = sys.argv[2] + ".d", self.path.strip("/").replace("/", "-")
        try:
            status, _, body = open(os.path.join(folder, name)).read().partition(" ")
        except OSError:
            status, body = 404 if self.path == "/health" else 200, ""
        self.send_response(int(status)); self.end_headers(); self.wfile.write(body.encode())
    def log_message(self, *a): pass
print(os.getpid(), file=open(sys.argv[2], "w"), flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", {"sandbox": {"name": "bwrap", "image": "host"}})


@pytest.fixture
def port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def serve(run: Run, port: int) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `hpcroll endpoint` with a command."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str, options: Sequence[str] = ()) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "hpcroll.cli", "endpoint", str(run.path), "--host", "127.0.0.1"]
        argv += ["--port", str(port), "--ready-s", "60", *options, "--", *command]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.05)


def test_server_is_registered_once_it_answers_and_withdrawn_and_stopped_on_sigterm(
    run: Run, port: int, serve: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    process = serve(sys.executable, "-c", SERVER, str(port), str(pid_file))
    wait_until(lambda: bool(run.endpoints))
    (endpoint,) = run.endpoints
    assert (endpoint.url, endpoint.served_name) == (f"http://127.0.0.1:{port}", "policy")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert run.endpoints == ()
    wait_until(lambda: not Path(f"/proc/{pid_file.read_text().strip()}").exists())


def test_server_that_ends_by_itself_is_withdrawn_and_a_failure(
    run: Run, port: int, serve: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    process = serve(sys.executable, "-c", SERVER, str(port), str(pid_file))
    wait_until(lambda: bool(run.endpoints))
    subprocess.run(["kill", "-9", pid_file.read_text().strip()], check=True)
    assert process.wait(60) == 1
    assert run.endpoints == ()


def test_server_that_never_answers_is_not_registered(
    run: Run, serve: Callable[..., subprocess.Popen[str]]
) -> None:
    process = serve("false")
    assert process.wait(60) == 1
    assert process.stderr is not None
    assert "ended with status 1 before it was ready" in process.stderr.read()
    assert run.endpoints == ()


def test_command_that_cannot_run_and_port_that_is_taken_are_bad_usage(
    port: int, serve: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = serve("no-such-server")
    assert process.wait(60) == 2
    pid_file = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", SERVER, str(port), str(pid_file)]) as other:
        wait_until(lambda: pid_file.exists() and _listens(port))
        process = serve("sleep", "60")
        assert process.wait(60) == 2
        assert process.stderr is not None
        assert "something answers at" in process.stderr.read()
        other.kill()


def answers(tmp_path: Path, path: str, status: int, body: object = "") -> None:
    """What the server says at `path` from now on."""
    folder = tmp_path / "pid.d"
    folder.mkdir(exist_ok=True)
    text = body if isinstance(body, str) else json.dumps(body)
    partial = folder / f".{path}"
    partial.write_text(f"{status} {text}")
    partial.replace(folder / path)


@pytest.fixture
def server(port: int, tmp_path: Path) -> Iterator[str]:
    """A server that answers what `answers` says; its URL."""
    argv = [sys.executable, "-c", SERVER, str(port), str(tmp_path / "pid")]
    with subprocess.Popen(argv) as process:
        wait_until(lambda: _listens(port))
        yield f"http://127.0.0.1:{port}/v1"
        process.kill()


def models(*names: str, owner: str = "") -> dict[str, object]:
    return {"data": [{"id": name, "owned_by": owner} for name in names]}


def test_server_that_warms_up_is_not_ready_though_other_paths_work(server: str, tmp_path: Path) -> None:
    answers(tmp_path, "health", 503)
    assert listens(server)
    assert not is_ready(server)
    answers(tmp_path, "health", 200)
    assert is_ready(server)
    answers(tmp_path, "health", 404)
    assert is_ready(server), "it has no such path; its models are there"


def test_server_is_told_by_what_it_says_of_itself(server: str, tmp_path: Path) -> None:
    assert identify(server) == EngineIdentity("vllm", ())
    answers(tmp_path, "v1-models", 200, models("m", "adapter", owner="vllm"))
    assert identify(server) == EngineIdentity("vllm", ("m", "adapter"))
    answers(tmp_path, "v1-models", 200, models("m", owner="sglang"))
    assert identify(server) == EngineIdentity("sglang", ("m",))
    answers(tmp_path, "v1-models", 200, models("m", owner="somebody"))
    answers(tmp_path, "get_model_info", 200, {"model_path": "/ckpt", "is_generation": True})
    assert identify(server) == EngineIdentity("sglang", ("m",))
    for nonsense in ("[]", '{"data": 7}', '{"data": [1]}', "<html>"):
        answers(tmp_path, "v1-models", 200, nonsense)
        answers(tmp_path, "get_model_info", 404)
        assert identify(server) == EngineIdentity("vllm", ())


def test_registration_waits_for_readiness_and_asks_the_server_what_it_is(
    run: Run, port: int, serve: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    answers(tmp_path, "health", 503)
    answers(tmp_path, "v1-models", 200, models("/ckpt/0", owner="sglang"))
    serve(sys.executable, "-c", SERVER, str(port), str(tmp_path / "pid"), options=["--version", "4"])
    wait_until(lambda: _listens(port))
    time.sleep(1.2)  # two of its looks
    assert run.endpoints == ()
    answers(tmp_path, "health", 200)
    wait_until(lambda: bool(run.endpoints))
    (endpoint,) = run.endpoints
    assert (endpoint.kind, endpoint.served_name, endpoint.version) == ("sglang", "/ckpt/0", 4)


def test_wish_of_the_operator_counts_more_than_what_the_server_says(
    run: Run, port: int, serve: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    answers(tmp_path, "v1-models", 200, models("base", "adapter", owner="sglang"))
    options = ["--kind", "vllm", "--served-name", "adapter"]
    serve(sys.executable, "-c", SERVER, str(port), str(tmp_path / "pid"), options=options)
    wait_until(lambda: bool(run.endpoints))
    (endpoint,) = run.endpoints
    assert (endpoint.kind, endpoint.served_name) == ("vllm", "adapter")


def test_server_of_other_models_is_refused_and_stopped(
    run: Run, port: int, serve: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    answers(tmp_path, "v1-models", 200, models("a", "b"))
    process = serve(sys.executable, "-c", SERVER, str(port), str(tmp_path / "pid"))
    assert process.wait(60) == 2
    assert process.stderr is not None
    assert "serves a, b, not 'policy'; say which with --served-name" in process.stderr.read()
    assert run.endpoints == ()
    assert not _listens(port)


def test_unknown_kind_is_refused_before_anything_is_started(
    serve: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = serve("touch", str(tmp_path / "started"), options=["--kind", "tgi"])
    assert process.wait(60) == 2
    assert not (tmp_path / "started").exists()


def test_hung_server_stops_beating_and_comes_back(
    run: Run,
    port: int,
    serve: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
) -> None:
    serve(sys.executable, "-c", SERVER, str(port), str(tmp_path / "pid"))
    wait_until(lambda: bool(run.endpoints))
    (beat,) = (run.path / "policy" / "endpoints").glob("*.beat")

    def count() -> int:
        return int(beat.read_text())

    wait_until(lambda: count() >= 2)
    answers(tmp_path, "health", 503)
    settled = threading.Event()
    settled.wait(1.0)  # a look that was under way
    before = count()
    settled.wait(7.0)
    assert count() == before
    answers(tmp_path, "health", 200)
    wait_until(lambda: count() > before)


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
