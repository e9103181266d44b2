"""Runs an inference server as long as a run needs it, and keeps the run told."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from types import FrameType

from hpcroll.errors import ConfigError, ModelError
from hpcroll.policy import EndpointLease, PolicyRegistry

log = logging.getLogger(__name__)

BEAT_S = 5.0
"""Seconds between two heartbeats of the endpoint."""
_LOOK_S = 0.5
_ANSWER_TIMEOUT_S = 10.0
_STOP_GRACE_S = 30.0
"""Seconds that the server may take after SIGTERM before it is killed."""
_PROBE_PATHS = ("/health", "/v1/models")


def serve(
    registry: PolicyRegistry,
    command: Sequence[str],
    *,
    served_name: str,
    port: int,
    host: str | None = None,
    ready_timeout_s: float = 1800.0,
) -> int:
    """Runs `command`, an inference server on `port`, and registers it once it answers.

    Beats while the server answers; on SIGTERM, SIGINT or SIGUSR2 withdraws it first and stops it then.
    Returns 0 after such a stop, 1 where the server ended by itself; its process group is dead then and
    the endpoint withdrawn. Raises `ConfigError` where the command cannot be run or the port is taken,
    `ModelError` where the server did not answer in time.
    """
    url = f"http://{host or socket.gethostname()}:{port}"
    if answers(url):
        raise ConfigError(f"something answers at {url} already; choose another --port, or stop it")
    stop = _StopSignals()
    try:
        process = subprocess.Popen(list(command), stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise ConfigError(f"server {command[0]!r} cannot be started: {error.strerror}") from error
    try:
        if not _await_answer(url, process, stop, ready_timeout_s):
            return 0 if stop.came else 1
        lease = registry.register_endpoint(url, served_name)
        log.info("endpoint=%s registered url=%s model=%s", lease.endpoint.endpoint_id, url, served_name)
        try:
            return _keep(lease, url, process, stop)
        finally:
            # Before the server stops: gateways then move on instead of running into a closed port.
            lease.withdraw()
    finally:
        _end(process)


class _StopSignals:
    """Set by the first stop signal; waits on it are cut short."""

    def __init__(self) -> None:
        self._event = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, self._note)

    @property
    def came(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._event.set()


def _await_answer(url: str, process: subprocess.Popen[bytes], stop: _StopSignals, timeout_s: float) -> bool:
    """True once the server answers, False where it or we are to end; raises `ModelError` in the end."""
    end = time.monotonic() + timeout_s
    while not answers(url):
        if process.poll() is not None:
            log.error("the server ended with status %d before it answered at %s", process.returncode, url)
            return False
        if time.monotonic() > end:
            raise ModelError(f"the server did not answer at {url} within {timeout_s:g} s; see its output")
        if stop.wait(_LOOK_S):
            return False
    return True


def _keep(lease: EndpointLease, url: str, process: subprocess.Popen[bytes], stop: _StopSignals) -> int:
    due_at = time.monotonic() + BEAT_S
    while not stop.wait(_LOOK_S):
        if process.poll() is not None:
            log.error("the server ended with status %d", process.returncode)
            return 1
        if time.monotonic() >= due_at:
            # A server that hangs must not look alive; gateways forget it until it beats again.
            if answers(url):
                lease.beat()
            due_at = time.monotonic() + BEAT_S
    return 0


def answers(url: str, *, timeout_s: float = _ANSWER_TIMEOUT_S) -> bool:
    """Whether an HTTP server at base URL `url` answers a health or model-list request with success."""
    for path in _PROBE_PATHS:
        try:
            with urllib.request.urlopen(url.removesuffix("/v1") + path, timeout=timeout_s):
                return True
        except urllib.error.HTTPError:
            continue
        except (OSError, http.client.HTTPException):
            return False
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the server's whole process group: engines start worker processes of their own."""
    for number, grace_s in ((signal.SIGTERM, _STOP_GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
