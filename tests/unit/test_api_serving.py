"""`hpcroll endpoint`: a server is registered while it answers, and gone when it is stopped."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcroll.api import Run

SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if self.path == "/health" else 200); self.end_headers()
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

    def start(*command: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "hpcroll.cli", "endpoint", str(run.path), "--host", "127.0.0.1"]
        argv += ["--port", str(port), "--ready-s", "60", "--", *command]
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


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
