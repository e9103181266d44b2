"""A state that several parties change: a chain of immutable files gives the changes one order.

`<directory>/1`, `2` ... are created once each, by link; the name `now` is replaced by the newest of them and
is all that a reader opens. It is never deleted: a name that a network file system has cached as missing
would be seen too late.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import Field, ValidationError

from hpcroll.contract import Record
from hpcroll.errors import CorruptRecordError
from hpcroll.fs import make_directories, publish, read_fresh, replace


class ChainState(Record):
    """What holds after the `generation`-th change."""

    generation: int = Field(default=0, ge=0)


S = TypeVar("S", bound=ChainState)


class StateChain(Generic[S]):
    """One such state: read by many, changed by few. For one thread.

    `first` is the state before the first change, `change` the path of the n-th change, `what` names the
    state in errors.
    """

    def __init__(self, first: S, *, now: Path, change: Callable[[int], Path], what: str) -> None:
        self._newest = first
        self._now = now
        self._change = change
        self._what = what

    def prepare(self) -> None:
        """Makes the name exist that is read; repeatable, before the first `read_existing`."""
        make_directories([self._now.parent])
        # Whoever finds it there has been answered by the server, whatever its client had cached.
        publish(self._now, self._newest.to_json().encode())

    def read(self) -> S:
        """The state in force, the first one where nobody ever changed or prepared it.

        Opens one file, and never goes back behind what this object has seen.
        """
        data = read_fresh(self._now)
        return self._newest if data is None else self._take(data)

    def read_existing(self) -> S:
        """The same, but a name that is not there is an `OSError`: after `prepare`, it must be."""
        return self._take(self._now.read_bytes())

    def change(self, edit: Callable[[S], S]) -> S:
        """Changes the state to what `edit` makes of it; the state that then holds, durable and visible.

        `edit` is called again where somebody else's change came first; nothing is written where it changes
        nothing.
        """
        make_directories([self._now.parent])
        while True:
            state = self._walk()
            wanted = edit(state)
            if wanted != state:
                # One winner per place: whoever loses it looks at the winner's change before it goes on.
                wanted = wanted.model_copy(update={"generation": state.generation + 1})
                if not publish(self._change(wanted.generation), wanted.to_json().encode()):
                    continue
                state = wanted
            self._repair_now()
            return state

    def _take(self, data: bytes) -> S:
        state = self._parse(data, self._now)
        if state.generation > self._newest.generation:
            self._newest = state
        return self._newest

    def _walk(self) -> S:
        """The last change of the chain; the name `now` may be behind it where its writer died."""
        state = self.read()
        while (data := read_fresh(path := self._change(state.generation + 1))) is not None:
            state = self._newest = self._parse(data, path)
        return state

    def _repair_now(self) -> None:
        while True:
            data = self._walk().to_json().encode()
            if read_fresh(self._now) == data:
                return
            replace(self._now, data)

    def _parse(self, data: bytes, where: Path) -> S:
        try:
            return type(self._newest).from_json(data)
        except ValidationError as error:
            raise CorruptRecordError(f"{where} is not {self._what}: {error}") from error
