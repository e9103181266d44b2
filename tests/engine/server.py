"""A vLLM server with a tiny random model, whose weights can be changed while it serves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hpcroll.testing.tiny_tokenizer import write_tokenizer
from tests.capabilities import ENGINE

HERE = Path(__file__).parent
PYTHON = ENGINE / "bin" / "python"
MODEL = "policy"
CONTEXT_TOKENS = 32_768
READY_S = 540.0
"""Under load the imports alone take minutes."""
CALL_S = 300.0


@dataclass(frozen=True)
class Checkpoints:
    """Two models of one shape with different weights, and their tokenizer."""

    tokenizer: Path
    weights: tuple[Path, Path]

    @classmethod
    def make(cls, root: Path, *, teach: int = 0) -> Self:
        """`teach`: steps of training after which most replies call a tool; 0 for random weights."""
        tokenizer = write_tokenizer(root / "tokenizer")
        weights = (root / "weights-0", root / "weights-1")
        for seed, path in enumerate(weights):
            argv = [PYTHON, HERE / "make_model.py", tokenizer, path, "--seed", str(seed)]
            argv += ["--context", str(CONTEXT_TOKENS), "--teach", str(teach)]
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=READY_S, env=_environment(root)
            )
            assert done.returncode == 0, done.stderr
        return cls(tokenizer, weights)


class EngineServer:
    """The server's process group; a context manager that leaves nothing behind."""

    def __init__(self, root: Path, checkpoint: Path, *, arguments: Sequence[str] = ()) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = root / "engine.log"
        # Not `vllm serve`: the command of the CPU wheel looks for a package named vllm and gives up.
        self._argv = [
            # It goes too when these tests are killed, which end no fixture then.
            *("setpriv", "--pdeathsig", "TERM"),
            *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)),
            *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", str(CONTEXT_TOKENS), "--enforce-eager"),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
            *("--enable-scale-out", *arguments),
        ]
        self._environment = _environment(root)

    def __enter__(self) -> Self:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self._await_ready()
            self._post("/update_weight_version", {"new_version": "0"})
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def load(self, checkpoint: Path, *, version: int, mode: str = "wait") -> None:
        """Changes the weights in place; calls in flight end first (`wait`) or are held (`keep`)."""
        self._post(f"/pause?mode={mode}", {})
        paths = {"weights_path": str(checkpoint)}
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": paths})
        # What a cache holds was computed by the old weights.
        self._post("/reset_prefix_cache?reset_running_requests=true", {})
        self._post("/update_weight_version", {"new_version": str(version)})
        self._post("/resume", {})

    def running(self) -> int:
        """Calls that the engine is sampling for now."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=CALL_S) as response:
            lines = response.read().decode().splitlines()
        return sum(
            int(float(line.split()[-1])) for line in lines if line.startswith("vllm:num_requests_running{")
        )

    def _await_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while not self._is_ready():
            assert self._process.poll() is None, f"the engine ended:\n{self._tail()}"
            assert time.monotonic() < deadline, f"no engine after {READY_S:g} s:\n{self._tail()}"
            time.sleep(0.5)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=CALL_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()}\n{self._tail()}") from error

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def _end(self) -> None:
        for number, patience_s in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 30.0)):
            if not self._signal(number):
                break
            deadline = time.monotonic() + patience_s
            while self._signal(0) and time.monotonic() < deadline:
                self._process.poll()
                time.sleep(0.1)
        self._process.wait(30)

    def _signal(self, number: int) -> bool:
        """False once nothing of the process group is left."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


def _environment(root: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(root),
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(root / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The endpoints that change weights.
        "VLLM_SERVER_DEV_MODE": "1",
    }
