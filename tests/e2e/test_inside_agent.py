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
    found = reach(tmp_path / "run", url, sandbox, image, network=False)
    assert found == {"reply": "hello", "reached": [], "open_ports": [8000], "seen": []}


def test_the_nodes_network_is_reached_where_the_config_gives_it(
    tmp_path: Path, serve_scripts: Callable[..., str]
) -> None:
    need("bwrap")
    url = serve_scripts([SCRIPT])
    found = reach(tmp_path / "run", url, "bwrap", "host", network=True)
    port = urlsplit(url).port
    assert ["127.0.0.1", port] in found["reached"]
    assert port in found["open_ports"]


def test_rollouts_side_by_side_see_their_own_session_and_no_other(
    tmp_path: Path, serve_scripts: Callable[..., str]
) -> None:
    need("bwrap")
    scripts, tasks = [], []
    for name in ("one", "two", "three", "four"):
        prompt = f"Say {name}, and nothing else."
        turn = Turn(text=name, stall_s=1.0)  # so that all four are under way at once
        scripts.append(Script(prompt=prompt, behaviours=(Behaviour(name=name, turns=(turn,)),)))
        tasks.append(Task(task_id=name, handler="math", prompt=prompt, spec={"answer": "1"}))
    config = {
        "model": {"endpoints": [serve_scripts(scripts)]},
        "sandbox": {"name": "bwrap", "image": "host"},
        "harness": {"name": "hpcroll.testing.reach:ReachHarness", "options": {"scan": True}},
        "launch": {"launcher": "local", "idle_s": 0},
    }
    run = Run.create(tmp_path / "run", config=config)
    run.submit(tasks, key="reach")
    run.launch(workers=1, wait=True)
    for result in run.results("reach", wait=False):
        record = result.trajectory().record
        found = json.loads(record.answer or "")
        assert (found["reply"], found["open_ports"]) == (record.task_id, [8000])
        [call] = record.calls
        [message] = call.messages
        assert isinstance(message, dict)
        assert message["content"] == f"Say {record.task_id}, and nothing else."


def reach(root: Path, url: str, sandbox: str, image: str, *, network: bool) -> dict[str, Any]:
    """What one agent inside a sandbox was told by its model, and which targets it reached."""
    # A listener on every address of the node, and the policy server.
    with socket.create_server(("0.0.0.0", 0)) as listener:
        targets = [["127.0.0.1", listener.getsockname()[1]], ["127.0.0.1", urlsplit(url).port]]
        if not network:
            targets.append(["192.0.2.1", 80])  # an address for documentation: no packet may leave
        # The journal, the registry and the spool of its own run, and whatever else stands beside it.
        paths = [str(path) for path in (root, root.parent, root / "journal", root / "policy")]
        config = {
            "model": {"endpoints": [url]},
            "sandbox": {"name": sandbox, "image": image, "network": network},
            "harness": {
                "name": "hpcroll.testing.reach:ReachHarness",
                "options": {"targets": targets, "paths": paths, "scan": True},
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
