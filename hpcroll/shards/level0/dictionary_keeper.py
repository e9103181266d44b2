"""The dictionaries a worker writes with: the run's, once any worker has made them from its first records."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from hpcroll.errors import ConfigError, HpcrollError, ShardError
from hpcroll.fs.atomic import publish, read_fresh
from hpcroll.fs.paths import RunPaths
from hpcroll.shards.format.dictionaries import (
    Dictionary,
    dictionaries_of,
    pack_dictionaries,
    parse_dictionaries,
)
from hpcroll.shards.format.dictionary_training import train
from hpcroll.shards.format.frames import FrameKind

log = logging.getLogger(__name__)

AUTO, OFF = "auto", "off"
SAMPLES = 16
"""Records that dictionaries are made from: so many groups' worth that one task does not fill them."""
_PER_GROUP = 2
_IMPATIENT_AFTER = 64
"""Records after which any group gives samples: the run may have few groups."""
_ENOUGH_BYTES = 1 << 20
_MOST_SAMPLES = 256
"""Small records are sampled until they are this many or this large."""
_LOOK_EVERY = 8
"""Records between two looks whether another worker has published dictionaries."""
_GENERATION = 0
_CLOSE_S = 10.0


def check_dictionary(choice: str) -> None:
    """Raises `ConfigError` where `choice` is neither `auto` nor `off` nor a sound file of dictionaries."""
    if choice in (AUTO, OFF):
        return
    try:
        parse_dictionaries(Path(choice).read_bytes(), Path(choice))
    except (OSError, ShardError) as error:
        raise ConfigError(
            f"shards.dictionary: {error}; give auto, off, or the file shards/dict.0 of another run"
        ) from error


class DictionaryKeeper:
    """Dictionaries never hold a worker up: whatever goes wrong with them, it writes without, and says so.

    Workers that train at the same time agree by the name that only one of them gets.
    """

    def __init__(self, paths: RunPaths, choice: str) -> None:
        """`choice`: `auto`, `off`, or the file with the dictionaries of another run."""
        self._paths = paths
        self._choice = choice
        self._current: dict[int, Dictionary] = {}
        self._samples: list[Mapping[int, bytes]] = []
        self._sample_bytes = 0
        self._sampled: Counter[str] = Counter()
        self._seen = 0
        self._training: threading.Thread | None = None
        self._settled = choice == OFF
        """Nothing more is to be found out: dictionaries are there, or will not be."""
        if choice != OFF:
            self._try(self._look)
        if not self._settled and choice != AUTO:
            self._try(self._take_over)

    @property
    def current(self) -> Mapping[int, Dictionary]:
        """By frame kind, what to compress with; empty until there are any."""
        return self._current

    @property
    def samples(self) -> bool:
        """Whether records are still asked for."""
        return not self._settled and self._training is None

    def offer(self, group_id: str, frames: Mapping[int, bytes]) -> None:
        """Tells of a record that was appended: it may become a sample, and the last one starts the training.

        Not for several threads at once.
        """
        if not self.samples or not frames.get(FrameKind.TOKENS):
            return  # a record without tokens is of a rollout that never ran
        self._seen += 1
        if self._seen % _LOOK_EVERY == 0:
            self._try(self._look)
        if self._settled or (self._sampled[group_id] >= _PER_GROUP and self._seen <= _IMPATIENT_AFTER):
            return
        self._sampled[group_id] += 1
        self._samples.append(frames)
        self._sample_bytes += sum(map(len, frames.values()))
        enough = self._sample_bytes >= _ENOUGH_BYTES or len(self._samples) >= _MOST_SAMPLES
        if enough and len(self._samples) >= SAMPLES:
            self._training = threading.Thread(target=self._train, name="dictionaries", daemon=True)
            self._training.start()

    def close(self) -> None:
        """Waits for a training that goes on, some seconds at most."""
        if self._training is not None:
            self._training.join(_CLOSE_S)

    def _train(self) -> None:
        samples, self._samples = self._samples, []
        self._try(lambda: self._agree(pack_dictionaries(train(samples))))

    def _take_over(self) -> None:
        path = Path(self._choice)
        data = path.read_bytes()
        parse_dictionaries(data, path)
        self._agree(data)

    def _agree(self, data: bytes) -> None:
        """Proposes the file `data` for the run, and takes what the run then has."""
        if publish(self._paths.dictionary_file(_GENERATION), data):
            log.info("published dictionaries bytes=%d from=%s", len(data), self._choice)
        self._look()

    def _look(self) -> None:
        """Takes the run's dictionaries where there are any."""
        first, copy = (self._paths.dictionary_file(_GENERATION, copy=copy) for copy in (False, True))
        # Only the first name is looked for in vain: a client may remember its absence for a minute, but
        # a reader on this node then finds the second, which is there before any record needs it.
        data = read_fresh(first)
        if data is None:
            return
        parse_dictionaries(data, first)
        publish(copy, data)  # whoever published the first may have died before this
        self._current = dictionaries_of(self._paths).newest()
        self._settled = True

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, HpcrollError, ValueError) as error:
            self._settled = True
            log.warning("records are written without dictionaries: %s", error)
