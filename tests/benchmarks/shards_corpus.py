"""Text to build imagined trajectories of: Python's own library, cut into tokens of a toy vocabulary.

Every machine that runs the benchmark has it, and its code and prose repeat as code and prose do. Equal
versions of Python give equal text and ids.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcroll.contract import Ids

VOCABULARY = 151_936
"""Ids are below this, as in current models; the toy vocabulary is spread over them."""
FIRST_CONTROL_ID = 151_643
TURN_OPENS, TURN_ENDS = FIRST_CONTROL_ID + 1, FIRST_CONTROL_ID + 2
"""Around each message; no text encodes to them."""
_PIECES = re.compile(r"\\[nt]|[ _]?[A-Za-z]{1,14}|\d|\n+ *|  +|[ ]?[^\sA-Za-z\d]{1,3}|\s|.", re.DOTALL)
_SKIPPED = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip"})
_CORPUS_BYTES = 9_000_000
_PROSE = re.compile(r'"""(.+?)"""', re.DOTALL)


class ToyTokenizer:
    """Whole words, single digits and runs of signs, the frequent ones with low ids; any ASCII text."""

    size = VOCABULARY

    def __init__(self, texts: Iterable[str], *, seed: int = 1) -> None:
        counted: Counter[str] = Counter({chr(code): 1 for code in range(128)})
        for text in texts:
            counted.update(_PIECES.findall(text))
        pieces = [piece for piece, _ in sorted(counted.items(), key=lambda item: (-item[1], item[0]))]
        # Ids follow the frequency in other text than this, so only by and large; the rare ones lie apart.
        rng = np.random.default_rng(seed)
        noise = np.exp(rng.normal(0.0, 1.0, len(pieces)))
        rank = np.argsort(np.argsort(np.arange(1, len(pieces) + 1) * noise, kind="stable"), kind="stable")
        low = min(2048, len(pieces))
        high = np.sort(low + rng.permutation(FIRST_CONTROL_ID - low)[: len(pieces) - low])
        spread = np.concatenate([np.arange(low), high])
        ids = spread[rank]
        self._ids = dict(zip(pieces, ids.tolist(), strict=True))
        self._pieces = dict(zip(ids.tolist(), pieces, strict=True))

    def encode(self, text: str) -> Ids:
        """The ids of `text`; a piece that is not in the vocabulary becomes its characters."""
        known, found = self._ids, []
        for piece in _PIECES.findall(text):
            number = known.get(piece)
            if number is None:
                found += [known[character] for character in piece]
            else:
                found.append(number)
        return np.array(found, np.uint32)

    def decode(self, ids: Ids) -> str:
        return "".join(map(self._pieces.__getitem__, ids.tolist()))

    def words(self) -> Ids:
        """The ids of words of five letters or more, ascending."""
        plain = (number for piece, number in self._ids.items() if len(piece.strip(" _")) > 4)
        return np.array(sorted(plain), np.uint32)


@dataclass(frozen=True, eq=False)
class SourceFile:
    """A file of the library: its path, and its tokens with the offset at which each line begins."""

    path: str
    ids: Ids
    starts: NDArray[np.int64]
    """One entry per line, then the end."""

    def line(self, number: int) -> Ids:
        """Line `number`, from 0, with its end."""
        return self.ids[self.starts[number] : self.starts[number + 1]]

    @property
    def line_count(self) -> int:
        return len(self.starts) - 1


@dataclass(frozen=True, eq=False)
class Corpus:
    """The tokenizer, the files, and prose to draw sentences from."""

    tokenizer: ToyTokenizer
    files: tuple[SourceFile, ...]
    prose: Ids
    follows: dict[int, NDArray[np.int64]]
    """Where in `prose` each id stands."""


@cache
def corpus() -> Corpus:
    """Python's library as a corpus; made once per process, in some seconds."""
    texts = list(_texts(Path(sysconfig.get_path("stdlib"))))
    tokenizer = ToyTokenizer(text for _, text in texts)
    files = tuple(_cut(tokenizer, path, text) for path, text in texts)
    found = ("\n".join(_PROSE.findall(text)) for _, text in texts)
    prose = tokenizer.encode(re.sub(r"[ \t]+", " ", "\n".join(found)))
    order = np.argsort(prose, kind="stable")
    bounds = np.flatnonzero(np.diff(prose[order])) + 1
    places = np.split(order, bounds)
    follows = {int(prose[place[0]]): place for place in places}
    return Corpus(tokenizer, files, prose, follows)


def _texts(root: Path) -> Iterator[tuple[str, str]]:
    size = 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _SKIPPED & set(name.parts) or size > _CORPUS_BYTES:
            continue
        text = path.read_bytes().decode("ascii", "ignore").replace("\r", "").replace("\0", "")
        if text.count("\n") >= 40:
            size += len(text)
            yield str(name), text


def _cut(tokenizer: ToyTokenizer, path: str, text: str) -> SourceFile:
    lines = [tokenizer.encode(line) for line in text.splitlines(keepends=True)]
    starts = np.cumsum([0, *map(len, lines)])
    return SourceFile(path, np.concatenate(lines), starts)
