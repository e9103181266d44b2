"""What a worker's gateway does with the registry: pauses in the middle of calls, versions, servers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from hpcroll.config import ModelConfig
from hpcroll.contract import PolicyId, Rollout, RolloutRef, Task
from hpcroll.fs import RunPaths, make_directories
from hpcroll.gateway import Gateway, GatewaySession, Journal, read_journal
from hpcroll.gateway.admission import Admission
from hpcroll.gateway.attribution import PolicySource
from hpcroll.policy import Gate, GateReport, PauseOutcome, Pauses, PolicyRegistry, PolicyVersion
from hpcroll.testing.harness_suite import until
from hpcroll.worker import policy_view
from hpcroll.worker.policy_view import PolicyView
from tests.serving import serving


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    make_directories(list(paths.directories()))
    return paths


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_view, "REFRESH_S", 0.05)


@dataclass
class Engine:
    """Answers with one token; a call whose turn is held waits for `go`."""

    url: str = ""
    version: int | None = None
    hold: bool = False
    begin: bool = False
    """Streams begin before they are held."""
    calls: int = 0
    gone: int = 0
    models: list[str] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls += 1
        self.models.append(body["model"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if body["stream"] and self.begin:
            await response.prepare(request)
            await response.write(_event(_piece("Hel", 7)))
        if self.hold:
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                self.gone += 1
                raise
        if not body["stream"]:
            return web.json_response(self._named(_reply()))
        if not response.prepared:
            await response.prepare(request)
        await response.write(_event(self._named(_piece("lo", 8))))
        await response.write(_event(_piece("", None)) + b"data: [DONE]\n\n")
        return response

    def _named(self, reply: dict[str, Any]) -> dict[str, Any]:
        return reply if self.version is None else {**reply, "weight_version": str(self.version)}


def _reply() -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "hi"},
        "finish_reason": "stop",
        "token_ids": [7],
        "logprobs": {"content": [{"logprob": -0.5}]},
    }
    return {"prompt_token_ids": [1, 2], "choices": [choice]}


def _piece(text: str, token: int | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    if token is None:
        choice["finish_reason"] = "stop"
    else:
        choice |= {"token_ids": [token], "logprobs": {"content": [{"logprob": -0.5}]}}
    return {"prompt_token_ids": [1, 2], "choices": [choice]}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + web.json_response(data).body + b"\n\n"  # type: ignore[operator]


@asynccontextmanager
async def engine(**mood: Any) -> AsyncIterator[Engine]:
    it = Engine(**mood)
    async with serving(web.post("/v1/chat/completions", it.chat)) as it.url:
        try:
            yield it
        finally:
            it.go.set()


@dataclass
class Bench:
    """A worker's gateway with its view, and the trainer's registry."""

    registry: PolicyRegistry
    view: PolicyView
    admission: Admission
    gateway: Gateway
    journal: Journal
    gate_file: Path
    sessions: int = 0

    def session(self) -> GatewaySession:
        task = Task(task_id="t", handler="command", prompt="p")
        ref = RolloutRef(segment="0" * 16, ordinal=self.sessions)
        self.sessions += 1
        return self.gateway.open_session(Rollout(ref=ref, task=task, sample_index=0, group_size=1), 1)

    async def pause(self, **bounds: Any) -> PauseOutcome:
        """A pause that is complete within a generous time, in a thread as a trainer's would be."""
        return await asyncio.to_thread(lambda: self.registry.pause(timeout_s=30, **bounds))


@asynccontextmanager
async def bench(paths: RunPaths, **config: Any) -> AsyncIterator[Bench]:
    admission = Admission()
    journal = Journal(paths.journal_file("w0"))
    journal.open()
    gate = Gate(paths, "w0", silence_s=60)
    async with PolicyView(paths, "policy", admission=admission, gate=gate) as view:
        gateway = Gateway(
            ModelConfig.model_validate(config),
            journal=journal,
            upstreams=view.upstreams,
            policy=PolicySource(known=view.policy, read=view.policy_now, history=view.history),
            admission=admission,
        )
        await gateway.start()
        try:
            yield Bench(PolicyRegistry(paths), view, admission, gateway, journal, paths.gate_file("w0"))
        finally:
            await gateway.close()
            await journal.close()


async def post(session: GatewaySession, **body: Any) -> tuple[int, str]:
    endpoint = session.outside
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as client,
        client.post(
            f"{endpoint.base_url}/chat/completions",
            json={"messages": [{"role": "user", "content": "p"}], **body},
        ) as response,
    ):
        return response.status, await response.text()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(within())


def ranges(session: GatewaySession) -> list[tuple[str, int, int] | None]:
    found = []
    for recorded in session.calls:
        policy = recorded.call.policy
        found.append(policy and (policy.lineage, policy.version_low, policy.version_high))
    return found


def test_calls_of_a_pause_wait_and_see_the_version_that_was_published_in_it(paths: RunPaths) -> None:
    async def scenario() -> None:
        # Shorter than the pause: waiting does not count.
        async with engine() as server, bench(paths, endpoints=[server.url], call_timeout_s=0.5) as it:
            it.registry.publish(0, weights="a")
            it.registry.publish(1, weights="b")
            await until(lambda: it.view.policy().version_high == 1)
            session = it.session()
            assert (await it.pause()).complete
            call = asyncio.ensure_future(post(session))
            await asyncio.sleep(1.0)
            assert not call.done()
            assert server.calls == 0
            it.registry.publish(2, weights="c")
            it.registry.resume()
            assert (await call)[0] == 200
            assert ranges(session) == [("main", 1, 2)]
            assert session.calls[0].call.error is None

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_call_that_is_cut_is_recorded_and_sent_again_and_the_agent_notices_nothing(
    paths: RunPaths, stream: bool
) -> None:
    async def scenario() -> None:
        async with engine(hold=True) as server, bench(paths, endpoints=[server.url]) as it:
            it.registry.publish(0, weights="a")
            session = it.session()
            call = asyncio.ensure_future(post(session, stream=stream))
            await until(lambda: server.calls == 1)
            outcome = await it.pause(drain_s=0.2)
            assert outcome.complete
            await until(lambda: server.gone == 1)
            assert not call.done()
            server.hold = False
            it.registry.publish(1, weights="b")
            it.registry.resume()
            status, text = await call
            assert status == 200
            assert "error" not in text
            cut, good = (recorded.call for recorded in session.calls)
            assert "cut by a pause" in str(cut.error)
            assert cut.reply is None
            assert good.error is None
            assert (cut.call_index, good.call_index) == (0, 1)
            assert ranges(session)[1] == ("main", 0, 1)
            assert session.error is None
            written = [item.call.error for item in read_journal(it.journal.path)]
            assert written == [cut.error, None]

    run(scenario)


def test_cut_reply_that_was_shown_in_part_ends_with_an_error_and_keeps_its_tokens(paths: RunPaths) -> None:
    async def scenario() -> None:
        async with engine(hold=True, begin=True) as server, bench(paths, endpoints=[server.url]) as it:
            session = it.session()
            call = asyncio.ensure_future(post(session, stream=True))
            await until(lambda: server.calls == 1 and it.admission.in_flight == 1)
            await until(lambda: it.gateway._services.pool._balance.sessions(server.url) == 1)
            await asyncio.sleep(0.1)
            assert (await it.pause(drain_s=0.1)).complete
            status, text = await call
            assert status == 200
            assert "Hel" in text
            assert "cut by a pause" in text
            assert "[DONE]" not in text
            (recorded,) = session.calls
            assert recorded.tokens.sampled_ids.tolist() == [7]
            assert "cut by a pause" in str(recorded.call.error)

    run(scenario)


def test_call_that_ends_within_the_drain_is_not_cut(paths: RunPaths) -> None:
    async def scenario() -> None:
        async with engine(hold=True) as server, bench(paths, endpoints=[server.url]) as it:
            session = it.session()
            call = asyncio.ensure_future(post(session))
            await until(lambda: server.calls == 1)
            pause = asyncio.ensure_future(it.pause(drain_s=30))
            await until(lambda: not it.admission.is_open)
            await asyncio.sleep(0.2)
            assert not pause.done()
            server.go.set()
            assert (await call)[0] == 200
            assert (await pause).complete
            assert server.calls == 1

    run(scenario)


def test_kept_calls_go_on_in_the_pause(paths: RunPaths) -> None:
    async def scenario() -> None:
        async with engine(hold=True) as server, bench(paths, endpoints=[server.url]) as it:
            session, other = it.session(), it.session()
            call = asyncio.ensure_future(post(session))
            await until(lambda: server.calls == 1)
            assert (await it.pause(mode="keep", drain_s=0)).complete
            late = asyncio.ensure_future(post(other))
            server.go.set()
            assert (await call)[0] == 200
            assert server.calls == 1
            it.registry.resume()
            assert (await late)[0] == 200

    run(scenario)


def test_pause_of_a_dead_trainer_ends_by_itself_for_everybody(paths: RunPaths) -> None:
    async def scenario() -> None:
        async with engine() as server, bench(paths, endpoints=[server.url]) as it:
            await it.pause(drain_s=0.0, max_s=0.3)
            assert (await post(it.session()))[0] == 200
            # Also for workers that start from now on: they would count its time anew.
            await until(lambda: it.registry.pauses() == ())

    run(scenario)


def test_worker_that_starts_in_a_pause_admits_nothing(paths: RunPaths) -> None:
    async def scenario() -> None:
        Pauses(paths).put("trainer", mode="cut", drain_s=1, max_s=60)  # type: ignore[arg-type]
        async with engine() as server, bench(paths, endpoints=[server.url]) as it:
            call = asyncio.ensure_future(post(it.session()))
            await asyncio.sleep(0.3)
            assert server.calls == 0
            it.registry.resume()
            assert (await call)[0] == 200

    run(scenario)


def test_gate_is_withdrawn_with_its_worker_and_silent_while_open(paths: RunPaths) -> None:
    async def scenario() -> None:
        async with engine() as server, bench(paths, endpoints=[server.url]) as it:
            first = it.gate_file.stat().st_ino
            session = it.session()
            for _ in range(5):
                await post(session)
                await asyncio.sleep(0.06)
            assert it.gate_file.stat().st_ino == first, "an open gate writes nothing"
            assert GateReport.from_json(it.gate_file.read_bytes()).in_flight == 0
        assert not paths.gate_file("w0").exists()

    run(scenario)


def test_version_published_during_a_call_is_in_its_range_although_no_look_came_between(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_view, "REFRESH_S", 3600.0)

    async def scenario() -> None:
        PolicyRegistry(paths).publish(4, weights="a")
        async with engine(hold=True) as server, bench(paths, endpoints=[server.url]) as it:
            session = it.session()
            call = asyncio.ensure_future(post(session))
            await until(lambda: server.calls == 1)
            it.registry.publish(5, weights="b")
            server.go.set()
            await call
            server.version = 4
            await post(session)
            assert ranges(session) == [("main", 3, 5), ("main", 4, 4)]

    run(scenario)


def test_calls_that_end_together_share_a_read_that_began_after_each_of_them(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_view, "REFRESH_S", 3600.0)

    async def scenario() -> None:
        registry = PolicyRegistry(paths)
        registry.publish(0, weights="w")
        async with bench(paths) as it:
            reads = 0
            began, goes_on = threading.Event(), threading.Event()
            latest = PolicyRegistry.latest

            def slow(self: PolicyRegistry, name: str | None = None) -> PolicyVersion | None:
                nonlocal reads
                reads += 1
                found = latest(self, name)
                began.set()
                assert goes_on.wait(30)
                return found

            monkeypatch.setattr(PolicyRegistry, "latest", slow)
            first = asyncio.ensure_future(it.view.policy_now())
            await asyncio.to_thread(began.wait, 30)
            monkeypatch.setattr(PolicyRegistry, "latest", latest)
            registry.publish(1, weights="w")
            monkeypatch.setattr(PolicyRegistry, "latest", slow)
            later = [asyncio.ensure_future(it.view.policy_now()) for _ in range(50)]
            await asyncio.sleep(0)
            later[0].cancel()
            goes_on.set()
            # The read that was under way had begun before the publication: it is not theirs.
            assert {policy.version_high for policy in await asyncio.gather(*later[1:])} == {1}
            await first
            assert reads == 2

    run(scenario)


def test_lineage_that_changes_during_a_call_leaves_it_to_the_older_one(paths: RunPaths) -> None:
    async def scenario() -> None:
        PolicyRegistry(paths).publish(7, weights="a")
        async with engine(hold=True) as server, bench(paths, endpoints=[server.url]) as it:
            session = it.session()
            call = asyncio.ensure_future(post(session))
            await until(lambda: server.calls == 1)
            it.registry.publish(3, weights="b", lineage="restart")
            server.go.set()
            await call
            for server.version in (7, 3):
                await post(session)
            assert ranges(session) == [("main", 6, 7), ("main", 7, 7), ("restart", 3, 3)]

    run(scenario)


def test_registered_servers_are_asked_by_their_own_names_and_versions(paths: RunPaths) -> None:
    async def scenario() -> None:
        async with engine() as server, bench(paths) as it:
            it.registry.publish(9, weights="w")
            lease = it.registry.register_endpoint(server.url, "org/adapter", version=2)
            await until(lambda: len(it.view.upstreams()) == 1)
            session = it.session()
            assert (await post(session))[0] == 200
            assert server.models == ["org/adapter"]
            assert ranges(session) == [("main", 2, 2)]
            lease.withdraw()
            await until(lambda: it.view.upstreams() == ())

    run(scenario)


def test_other_policies_of_the_run_are_not_ours(paths: RunPaths) -> None:
    async def scenario() -> None:
        async with bench(paths) as it:
            it.registry.publish(5, weights="w", name="lora")
            it.registry.publish(2, weights="w")
            it.registry.publish(6, weights="w", name="lora")
            await until(lambda: it.view.policy().lineage == "main")
            assert it.view.policy() == PolicyId(
                policy_name="policy", lineage="main", version_low=2, version_high=2
            )
            assert [entry.version_high for entry in it.view.history()] == [2]

    run(scenario)


def test_file_server_in_trouble_leaves_what_is_known_in_use(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        PolicyRegistry(paths).publish(1, weights="w")
        async with engine() as server, bench(paths, endpoints=[server.url]) as it:
            looks = 0

            def broken(*_: object) -> object:
                nonlocal looks
                looks += 1
                raise OSError("stale file handle")

            with monkeypatch.context() as patch:
                patch.setattr(PolicyRegistry, "latest", broken)
                await until(lambda: looks >= 3)
                session = it.session()
                assert (await post(session))[0] == 200
                assert ranges(session) == [("main", 0, 1)]
            it.registry.publish(2, weights="x")
            await until(lambda: it.view.policy().version_high == 2)

    run(scenario)
