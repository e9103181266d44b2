"""Load is calls plus sessions; sessions keep their server unless it has notably more to do than another."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

from hpcroll.gateway.balance import MOVE_SLACK, Balance


@dataclass
class Simulation:
    """Rollouts that take turns between a model call and a tool call, on servers that come and go.

    Times in seconds, exponential; a rollout that ends is followed by a new one, so that `width` are there.
    """

    width: int
    servers: list[str]
    seed: int = 0
    call_s: float = 5.0
    tool_s: float = 5.0
    calls_per_session: int = 40
    balance: Balance = field(default_factory=Balance)
    now: float = 0.0
    moves: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    first_calls: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.queue: list[tuple[float, int, str, str | None]] = []
        self.homes: dict[str, str] = {}
        self.left: dict[str, int] = {}
        self.started = 0
        for _ in range(self.width):
            # As in the middle of a run: rollouts are at different turns.
            self.start(self.random.randint(1, self.calls_per_session))

    def start(self, calls: int) -> None:
        session = f"rollout-{self.started}.1"
        self.started += 1
        self.left[session] = calls
        self.push(self.random.uniform(0, self.tool_s), session, None)

    def push(self, after_s: float, session: str, server: str | None) -> None:
        heapq.heappush(self.queue, (self.now + after_s, self.random.getrandbits(32), session, server))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.queue and self.queue[0][0] <= end:
            self.now, _, session, server = heapq.heappop(self.queue)
            if server is None:
                self.call(session)
            else:
                self.answer(session, server)
        self.now = end

    def call(self, session: str) -> None:
        server = self.balance.choose(session, self.servers)
        assert server is not None
        self.calls[server] += 1
        home = self.homes.get(session)
        if home is None:
            self.first_calls[server] += 1
        elif home != server:
            self.moves += 1
        self.homes[session] = server
        self.balance.begin(server)
        self.balance.settle(session, server)
        self.push(self.random.expovariate(1 / self.call_s), session, server)

    def answer(self, session: str, server: str) -> None:
        self.balance.end(server)
        self.left[session] -= 1
        if self.left[session]:
            self.push(self.random.expovariate(1 / self.tool_s), session, None)
        else:
            self.balance.forget(session)
            del self.homes[session]
            self.start(self.calls_per_session)

    def sessions(self) -> list[int]:
        return [self.balance.sessions(server) for server in self.servers]


def test_new_server_gets_its_share_and_not_everything() -> None:
    """64 rollouts on two servers: a third one is level with them within the length of a rollout."""
    for seed in range(5):
        simulation = Simulation(64, ["a", "b"], seed=seed)
        simulation.run(400)
        assert simulation.moves == 0
        assert all(abs(count - 32) <= 6 for count in simulation.sessions()), simulation.sessions()

        simulation.servers.append("c")
        simulation.first_calls.clear()
        simulation.run(20)  # two turns of each rollout
        taken = simulation.balance.sessions("c")
        assert 7 <= taken <= 21, "some of what there is moves at once, and no more than a third"
        assert simulation.moves <= 20, "and the others keep their cached prefixes"

        simulation.run(400)
        assert all(abs(count - 64 / 3) <= 7 for count in simulation.sessions()), simulation.sessions()
        # What the counters are there for: after the first rush it gets what the others get.
        simulation.first_calls.clear()
        simulation.calls.clear()
        simulation.run(800)
        share = simulation.calls["c"] / simulation.calls.total()
        assert 0.28 < share < 0.39, share
        assert simulation.first_calls["c"] / simulation.first_calls.total() < 0.5


def test_new_server_gets_its_share_of_many_workers_that_do_not_see_each_other() -> None:
    workers = [Simulation(8, ["a", "b"], seed=number) for number in range(16)]
    for worker in workers:
        worker.run(400)
        worker.servers.append("c")
        worker.run(60)
    taken = sum(worker.balance.sessions("c") for worker in workers)
    assert 20 <= taken <= 128 / 3, taken
    for worker in workers:
        worker.run(400)
        worker.calls.clear()
        worker.run(400)
    calls = sum((worker.calls for worker in workers), Counter[str]())
    assert 0.28 < calls["c"] / calls.total() < 0.39, calls


def test_counters_return_to_zero_however_servers_came_and_went() -> None:
    simulation = Simulation(16, ["a", "b"], calls_per_session=5)
    simulation.run(100)
    simulation.servers.remove("a")
    simulation.run(100)
    simulation.servers.append("c")
    simulation.run(100)
    simulation.calls_per_session = 1
    for session in simulation.left:
        simulation.left[session] = 1
    simulation.start = lambda calls: None  # type: ignore[method-assign]
    simulation.run(1000)
    assert not simulation.queue
    assert [simulation.balance.load(server) for server in "abc"] == [0, 0, 0]


def test_sessions_of_a_removed_server_spread_over_the_others() -> None:
    simulation = Simulation(60, ["a", "b", "c"], seed=1)
    simulation.run(300)
    simulation.servers.remove("a")
    simulation.run(60)
    assert simulation.balance.sessions("a") <= 2  # those that are still in a long tool call
    assert all(abs(count - 30) <= 5 for count in simulation.sessions()), simulation.sessions()


def test_evenly_loaded_servers_keep_every_session() -> None:
    for width in (4, 8, 32, 128):
        simulation = Simulation(width, ["a", "b", "c", "d"], seed=width)
        simulation.run(600)
        calls = simulation.calls.total()
        assert simulation.moves / calls < 0.005, f"{simulation.moves} of {calls} calls left a warm cache"


def test_slow_server_ends_with_fewer_sessions() -> None:
    """Nobody tells how fast a server is; the calls that pile up on it do."""

    class Slow(Simulation):
        def push(self, after_s: float, session: str, server: str | None) -> None:
            super().push(after_s * (4 if server == "slow" else 1), session, server)

    simulation = Slow(48, ["slow", "fast"], seed=3)
    simulation.run(2000)
    slow, fast = simulation.sessions()
    assert slow < 0.8 * fast, (slow, fast)


def test_session_moves_only_from_a_home_that_has_notably_more() -> None:
    balance = Balance()
    for session in range(MOVE_SLACK + 1):
        balance.settle(f"s{session}", "busy")
    assert balance.choose("s0", ["busy", "idle"]) == "busy"
    balance.settle("one more", "busy")
    assert balance.choose("s0", ["busy", "idle"]) == "idle"
    for _ in range(2):
        balance.begin("idle")
    assert balance.choose("s0", ["busy", "idle"]) == "busy"


def test_workers_that_do_not_see_each_other_do_not_all_begin_with_one_server() -> None:
    servers = ["http://a", "http://b", "http://c", "http://d"]
    first = Counter(Balance().choose(f"segment/{number}.1", servers) for number in range(400))
    assert all(70 <= first[server] <= 130 for server in servers), first


def test_no_server_is_no_choice() -> None:
    assert Balance().choose("s", []) is None


def test_evicted_sessions_choose_anew() -> None:
    balance = Balance()
    for session in ("s0", "s1"):
        balance.settle(session, "a")
    balance.evict("a")
    assert balance.sessions("a") == 0
    balance.begin("a")
    assert balance.choose("s0", ["a", "b"]) == "b"
