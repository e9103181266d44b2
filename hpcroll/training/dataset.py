"""A finished run as a torch dataset: split over ranks and loader workers, resumed exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hpcroll.errors import ConfigError
from hpcroll.shards import Batch, open_run
from hpcroll.training.tensors import padded_tensors, tensors

_Item = dict[str, Any]


class TrajectoryDataset(IterableDataset[_Item]):  # type: ignore[misc]
    """Batches of the run at `path` as dictionaries of tensors, `max_tokens` tokens each at most.

    Groups are split over `world` ranks, and over the workers of a `DataLoader`; each is in one part. Use it
    with `loader()`, or with a `DataLoader` of `batch_size=None`: the items are batches already.

    `state_dict` is exact in the process that iterates: for a plain loop over the dataset, for `loader()` with
    any number of workers, and in the workers of loaders that ask each for its state. A live run is followed
    with `RunReader.steps` instead.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_tokens: int,
        rank: int = 0,
        world: int = 1,
        padding: Literal["left", "right"] | None = None,
        pad_id: int = 0,
        **options: Any,
    ) -> None:
        """`padding`: the side, where batches are padded instead of laid end to end. `options` are those of
        `open_run`: filters, `shuffle` and `window`, `trust_marks`."""
        super().__init__()
        self._path = path
        self._max_tokens = max_tokens
        self._rank, self._world = rank, world
        self._padding = padding
        self._pad_id = pad_id
        self._options = options
        self._loaded: dict[str, Any] = {}
        """Reader states by worker, from which the next iteration goes on."""
        self._states: dict[str, Any] = {}
        """The same after what was yielded."""
        self._workers = 1

    def __iter__(self) -> Iterator[_Item]:
        info = get_worker_info()
        stream = self._tagged()
        self._begin(1 if info is None else info.num_workers)
        for worker, state, item in stream:
            self._states[worker] = state
            yield item

    def loader(self, *, num_workers: int = 0, **options: Any) -> Iterator[_Item]:
        """The same items through a `DataLoader` with `options`; `state_dict` counts what was yielded here,
        not what workers have read ahead. After a resume the workers take turns anew, so the order may
        differ."""
        self._require_workers(max(num_workers, 1))
        stream = iter(DataLoader(_Tagged(self), batch_size=None, num_workers=num_workers, **options))
        self._begin(max(num_workers, 1))
        for worker, state, item in stream:
            self._states[worker] = state
            yield item

    def state_dict(self) -> dict[str, Any]:
        """The position after the items that were yielded, as JSON."""
        return {"workers": self._workers, "states": self._states | self._loaded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on from `state`; it must use as many workers."""
        self._workers = int(state["workers"])
        self._loaded = dict(state["states"])
        self._states = {}

    def _begin(self, workers: int) -> None:
        """A new pass has taken what was loaded; the one after it starts from the beginning."""
        self._states, self._loaded, self._workers = self._loaded, {}, workers

    def _tagged(self) -> Iterator[tuple[str, dict[str, Any], _Item]]:
        """The items of this worker, each with the worker's number and the reader's state after it."""
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        self._require_workers(count)
        worker = str(number)
        reader = open_run(self._path, columns=["tokens"], **self._options)
        reader = reader.split(self._rank, self._world).split(number, count)
        if worker in self._loaded:
            reader.load_state_dict(self._loaded[worker])
        batches = reader.packed(self._max_tokens)
        return ((worker, reader.state_dict(), self._convert(batch)) for batch in batches)

    def _require_workers(self, count: int) -> None:
        if self._loaded and self._workers != count:
            raise ConfigError(
                f"the state of this dataset is of {self._workers} loader workers, not {count}: each has read "
                "its own part; go on with as many"
            )

    def _convert(self, batch: Batch) -> _Item:
        if self._padding is None:
            return tensors(batch)
        return padded_tensors(batch, side=self._padding, pad_id=self._pad_id)


class _Tagged(IterableDataset[tuple[str, dict[str, Any], _Item]]):  # type: ignore[misc]
    """The items with where each leaves its worker, for the process that the loader runs in."""

    def __init__(self, dataset: TrajectoryDataset) -> None:
        super().__init__()
        self._dataset = dataset

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any], _Item]]:
        return self._dataset._tagged()
