"""An agent inside a sandbox without network reaches its model, and nothing else."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from hpcroll.api import Run
from hpcroll.contract import StopReason, Task
from hpcroll.testing.policy_server import Behaviour, Script, Turn
from tests.capabilities import IMAGES, need

PROMPT = "Say hello to the reach test."
TASK = Task(task_id="reach", handler="math", prompt=PROMPT, spec={"answer": "1"})
SCRIPT = Script(prompt=PROMPT, behaviours=(Behaviour(name="greets", turns=(Turn(text="hello"),)),))


@pytest.mark.parametrize(
    ("sandbox", "image"),
    [
        ("bwrap", "host"),
        pytest.param("apptainer", str(IMAGES / "base"), marks=pytest.mark.apptainer),
        pytest.param("apptainer", str(IMAGES / "base.sif"), marks=pytest.mark.apptainer),
    ],
    ids=["bwrap", "apptainer-directory", "apptainer-sif"],
)
def test_only_the_gateway_is_reachable(
    tmp_path: Path, serve_scripts: Callable[..., str], sandbox: str, image: str
) -> None:
    need("bwrap" if sandbox == "bwrap" else "apptainer")
    url = serve_scripts([SCRIPT])
    assert reach(tmp_path / "run", url, sandbox, image, network=False) == {"reply": "hello", "reached": []}


def test_the_nodes_network_is_reached_where_the_config_gives_it(
    tmp_path: Path, serve_scripts: Callable[..., str]
) -> None:
    need("bwrap")
    url = serve_scripts([SCRIPT])
    found = reach(tmp_path / "run", url, "bwrap", "host", network=True)
    assert ["127.0.0.1", urlsplit(url).port] in found["reached"]


def reach(root: Path, url: str, sandbox: str, image: str, *, network: bool) -> dict[str, Any]:
    """What one agent inside a sandbox was told by its model, and which targets it reached."""
    # A listener on every address of the node, and the policy server.
    with socket.create_server(("0.0.0.0", 0)) as listener:
        targets = [["127.0.0.1", listener.getsockname()[1]], ["127.0.0.1", urlsplit(url).port]]
        if not network:
            targets.append(["192.0.2.1", 80])  # an address for documentation: no packet may leave
        config = {
            "model": {"endpoints": [url]},
            "sandbox": {"name": sandbox, "image": image, "network": network},
            "harness": {
                "name": "hpcroll.testing.reach:ReachHarness",
                "options": {"targets": targets},
            },
            "launch": {"launcher": "local", "idle_s": 0},
        }
        run = Run.create(root, config=config)
        run.submit([TASK], key="reach")
        run.launch(workers=1, wait=True)
    [result] = run.results("reach", wait=False)
    record = result.trajectory().record
    assert record.stop_reason is StopReason.EXITED, record
    assert [call.error for call in record.calls] == [None]
    found: dict[str, Any] = json.loads(record.answer or "")
    return found
