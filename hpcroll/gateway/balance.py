"""Which inference server a call goes to.

The load of a server is the calls it has now plus the sessions that are at home there: calls that are under
way, and calls that will come. A session is at home where its last call was taken, because its prompt is in
that server's prefix cache. It stays there unless its home has notably more to do than the least loaded
server, `MOVE_FACTOR` times as much and `MOVE_SLACK` more: then filling another cache once is the cheaper
way. Each move takes load off the one and puts it on the other, so that moves end by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import xxhash

MOVE_FACTOR = 1.5
MOVE_SLACK = 4


class Balance:
    """Calls under way and homes of sessions, by server; servers are named by any string."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._sessions: Counter[str] = Counter()
        self._homes: dict[str, str] = {}

    def choose(self, session: str, servers: Sequence[str]) -> str | None:
        """The server for the next call of `session`; None where there is none.

        Ties are broken by a hash of session and server: workers that cannot see each other's calls would
        otherwise all begin with the first server.
        """
        best = min(servers, key=lambda server: (self.load(server), _rank(session, server)), default=None)
        home = self._homes.get(session)
        if best is None or home is None or home not in servers:
            return best
        others = self.load(home) - 1  # without this session
        return best if others > MOVE_FACTOR * self.load(best) + MOVE_SLACK else home

    def load(self, server: str) -> int:
        """Calls under way and sessions at home."""
        return self._calls[server] + self._sessions[server]

    def calls(self, server: str) -> int:
        """Calls under way."""
        return self._calls[server]

    def sessions(self, server: str) -> int:
        """Sessions at home."""
        return self._sessions[server]

    def begin(self, server: str) -> None:
        """A call goes there."""
        self._calls[server] += 1

    def end(self, server: str) -> None:
        """A call that went there is over."""
        self._calls[server] -= 1

    def settle(self, session: str, server: str) -> None:
        """`server` took a call of `session`, which is at home there from now on."""
        self.forget(session)
        self._homes[session] = server
        self._sessions[server] += 1

    def forget(self, session: str) -> None:
        """A session is at home nowhere any more: it has ended."""
        home = self._homes.pop(session, None)
        if home is not None:
            self._sessions[home] -= 1

    def evict(self, server: str) -> None:
        """A server that failed loses its sessions."""
        for session in [session for session, home in self._homes.items() if home == server]:
            self.forget(session)


def _rank(session: str, server: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{session}\0{server}".encode())
