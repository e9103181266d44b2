"""Runs an inference server as long as a run needs it, and keeps the run told."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

from hpcroll.api.engine_probe import EngineIdentity, identify, is_ready, listens
from hpcroll.errors import ConfigError, ModelError
from hpcroll.policy import KINDS, EndpointLease, PolicyRegistry

log = logging.getLogger(__name__)

BEAT_S = 5.0
"""Seconds between two heartbeats of the endpoint."""
_LOOK_S = 0.5
_STOP_GRACE_S = 30.0
"""Seconds that the server may take after SIGTERM before it is killed."""


def serve(
    registry: PolicyRegistry,
    command: Sequence[str],
    *,
    served_name: str | None,
    policy_name: str,
    port: int,
    host: str | None = None,
    kind: str | None = None,
    version: int | None = None,
    ready_timeout_s: float = 1800.0,
    drain_s: float = 2.0,
) -> int:
    """Runs `command`, an inference server on `port`, and registers it once it says that it is ready.

    `served_name`: the model name that it expects; where absent `policy_name` if it serves that, else the one
    model that it serves. `kind`: `vllm` or `sglang`, asked of the server where absent. `version`: the policy
    version that it serves for good. Beats while the server is ready; on SIGTERM, SIGINT or SIGUSR2
    withdraws it, lets calls in flight finish for `drain_s` seconds, and stops it then.

    Returns 0 after such a stop, 1 where the server ended by itself; its process group is dead then and
    the endpoint withdrawn. Raises `ConfigError` where the command cannot be run, the port is taken or the
    server serves no such model, `ModelError` where the server was not ready in time.
    """
    url = f"http://{host or socket.gethostname()}:{port}"
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"endpoint kind {kind!r} is unknown; known: {', '.join(KINDS)}")
    if listens(url):
        raise ConfigError(f"something answers at {url} already; choose another --port, or stop it")
    stop = _StopSignals()
    try:
        process = subprocess.Popen(list(command), stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise ConfigError(f"server {command[0]!r} cannot be started: {error.strerror}") from error
    try:
        if not _await_ready(url, process, stop, ready_timeout_s):
            return 0 if stop.came else 1
        said = identify(url)
        lease = registry.register_endpoint(
            url,
            _pick_name(served_name, policy_name, said, url),
            version=version,
            kind=kind or said.kind,
        )
        endpoint = lease.endpoint
        log.info(
            "endpoint=%s registered url=%s kind=%s model=%s",
            endpoint.endpoint_id,
            url,
            endpoint.kind,
            endpoint.served_name,
        )
        try:
            status = _keep(lease, url, process, stop)
        finally:
            # Before the server stops: gateways then move on instead of running into a closed port.
            _attempt("withdrawn", lease.withdraw)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(drain_s)
        return status
    finally:
        _end(process)


def _pick_name(wanted: str | None, policy_name: str, said: EngineIdentity, url: str) -> str:
    """The model name to send; raises `ConfigError` where the server would refuse it."""
    name = wanted or policy_name
    if not said.models or name in said.models:
        return name
    if wanted is None and len(said.models) == 1:
        return said.models[0]
    raise ConfigError(
        f"the server at {url} serves {', '.join(said.models)}, not {name!r}; say which with --served-name"
    )


def _attempt(what: str, act: Callable[[], None]) -> None:
    try:
        act()
    except OSError as error:
        # A file server in trouble comes back; a healthy engine must not end for it.
        log.warning("the endpoint could not be %s: %s", what, error)


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


def _await_ready(url: str, process: subprocess.Popen[bytes], stop: _StopSignals, timeout_s: float) -> bool:
    """True once the server is ready, False where it or we are to end; raises `ModelError` in the end."""
    end = time.monotonic() + timeout_s
    while not is_ready(url):
        if process.poll() is not None:
            log.error("the server ended with status %d before it was ready at %s", process.returncode, url)
            return False
        if time.monotonic() > end:
            raise ModelError(f"the server was not ready at {url} within {timeout_s:g} s; see its output")
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
            if is_ready(url):
                _attempt("kept alive", lease.beat)
            due_at = time.monotonic() + BEAT_S
    return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the server's whole process group: engines start worker processes of their own."""
    for number, grace_s in ((signal.SIGTERM, _STOP_GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
