"""What the agents of one imagined group look at: a repository of their own, and what its tools print."""

from __future__ import annotations

import random
from functools import cache

import numpy as np

from hpcroll.contract import Ids
from tests.benchmarks.shards_corpus import Corpus, SourceFile

FILES = 14
_WINDOW = 64
"""Words trade places with others that are about as frequent."""
_RENAMED = 0.5
_VIEWS = (40, 80, 120, 200)


class Repository:
    """Some files of the corpus in which half of the words stand for others, so that no two groups read the
    same text; siblings do, and come back to the same places."""

    def __init__(self, corpus: Corpus, seed: str) -> None:
        self._corpus = corpus
        self._rng = random.Random(seed)
        self._renamed = _renaming(corpus, self._rng)
        first = self._rng.randrange(len(corpus.files))
        chosen = [corpus.files[(first + step) % len(corpus.files)] for step in range(FILES)]
        self._rng.shuffle(chosen)
        self.files = [
            SourceFile(self._renamed_text(file.path), self._renamed[file.ids], file.starts) for file in chosen
        ]
        self.keywords = [self._keyword() for _ in range(16)]
        self._found: dict[int, list[Ids]] = {}

    def prose(self, rng: random.Random, count: int) -> Ids:
        """`count` ids of new text: for some words it goes on as the corpus does here, then there."""
        prose, follows, parts, size = self._corpus.prose, self._corpus.follows, [], 0
        place = rng.randrange(len(prose) - 1)
        while size < count:
            part = prose[place : place + 1 + int(rng.expovariate(0.2))]
            parts.append(part)
            size += len(part)
            places = follows[int(part[-1])]
            place = int(places[rng.randrange(len(places))]) + 1
            if place >= len(prose):
                place = rng.randrange(len(prose) - 1)
        return self._renamed[np.concatenate(parts)[:count]]

    def pick(self, rng: random.Random) -> SourceFile:
        """A file; the first ones are looked at most."""
        return self.files[min(int(rng.paretovariate(0.7)) - 1, FILES - 1)]

    def view(self, rng: random.Random, budget: int) -> tuple[str, list[Ids]]:
        """A command that shows lines of a file, numbered, and what it prints."""
        file = self.pick(rng)
        wanted = max((count for count in _VIEWS if count * 14 <= budget), default=_VIEWS[0])
        pages = max(1, file.line_count // 40)
        start = 40 * min(int(rng.paretovariate(0.6)) - 1, pages - 1)
        lines = range(start, min(start + wanted, file.line_count))
        command = f"sed -n '{start + 1},{start + wanted}p' {file.path}"
        if rng.random() < 0.6:
            return command, [file.line(n) for n in lines]
        return f"{command} | cat -n", [part for n in lines for part in (self._number(n + 1), file.line(n))]

    def search(self, rng: random.Random, budget: int) -> tuple[str, list[Ids]]:
        """A command that finds a word in every file, and its output of at most about `budget` ids."""
        keyword = self.keywords[min(int(rng.paretovariate(0.8)) - 1, len(self.keywords) - 1)]
        if keyword not in self._found:
            self._found[keyword] = self._lines_with(keyword)
        lines, size = [], 0
        for line in self._found[keyword]:
            if lines and size > budget:
                break
            lines.append(line)
            size += len(line)
        return f"grep -rn {self.text(np.array([keyword], np.uint32)).strip()} .", lines

    def test(self, rng: random.Random, budget: int) -> tuple[str, list[Ids]]:
        """A test command and its output: names, a traceback through the files, times that never repeat."""
        file, failed = self.pick(rng), rng.randrange(3)
        parts = [
            self.ids(f"{'=' * 30} test session starts {'=' * 30}\ncollected {40 + len(file.path)} items\n")
        ]
        names = [self._test_name(file, number) for number in range(min(30, max(4, budget // 60)))]
        parts += [self.ids(f"{name} PASSED\n") for name in names[failed:]]
        size = sum(map(len, parts))
        for name in names[:failed]:
            parts.append(self.ids(f"{'_' * 20} {name} {'_' * 20}\n"))
            for _ in range(max(1, min(8, (budget - size) // 80 // (failed or 1)))):
                where = self.pick(rng)
                number = 20 * rng.randrange(max(1, where.line_count // 20))
                parts.append(self.ids(f'  File "/work/{where.path}", line {number + 1}, in run\n'))
                parts.append(where.line(number))
        parts.append(self.ids(f"{failed} failed, {len(names) - failed} passed in {rng.random() * 9:.2f}s\n"))
        return f"python -m pytest -x {file.path.replace('/', '/test_')}", parts

    def edit(self, rng: random.Random) -> tuple[str, str, str, list[Ids]]:
        """Path, old text, new text, and the answer of the tool that made the edit."""
        file, count = self.pick(rng), rng.randint(2, 14)
        start = 8 * rng.randrange(max(1, file.line_count // 8))
        numbers = range(start, min(start + count, file.line_count))
        old = [file.line(n) for n in numbers]
        new = [self._changed(rng, line) for line in old]
        before = [file.line(n) for n in range(max(0, start - 4), start)]
        shown = enumerate([*before, *new], start=max(0, start - 4) + 1)
        answer = [self.ids(f"The file {file.path} has been edited. Here is the result:\n")]
        answer += [part for n, line in shown for part in (self._number(n), line)]
        return file.path, self.text(np.concatenate(old)), self.text(np.concatenate(new)), answer

    def ids(self, text: str) -> Ids:
        return self._corpus.tokenizer.encode(text)

    def text(self, ids: Ids) -> str:
        return self._corpus.tokenizer.decode(ids)

    def _number(self, number: int) -> Ids:
        return _numbered(self._corpus, number)

    def _renamed_text(self, text: str) -> str:
        return self.text(self._renamed[self.ids(text)])

    def _keyword(self) -> int:
        file = self._rng.choice(self.files)
        words = np.intersect1d(file.ids, self._renamed[_words(self._corpus)])
        return int(words[self._rng.randrange(len(words))])

    def _lines_with(self, keyword: int) -> list[Ids]:
        found = []
        for file in self.files:
            at = np.flatnonzero(file.ids == keyword)
            for number in np.unique(np.searchsorted(file.starts, at, side="right") - 1).tolist():
                found.append(np.concatenate([self.ids(f"./{file.path}:{number + 1}:"), file.line(number)]))
        return found

    def _test_name(self, file: SourceFile, number: int) -> str:
        line = file.line((37 * number) % file.line_count)
        word = "".join(c for c in self.text(line) if c.isalpha())[:18].lower()
        return f"test_{file.path}::test_{word}_{number}"

    def _changed(self, rng: random.Random, line: Ids) -> Ids:
        if rng.random() < 0.5 or len(line) < 3:
            return line
        at = rng.randrange(len(line) - 1)
        put = self.files[0].ids[rng.randrange(len(self.files[0].ids) - 4) :][: rng.randint(1, 4)]
        return np.concatenate([line[:at], put, line[at + 1 :]])


def _renaming(corpus: Corpus, rng: random.Random) -> Ids:
    """A table from id to id that permutes half of the longer words among their neighbours in frequency."""
    numbers = np.random.default_rng(rng.randrange(1 << 32))
    table = np.arange(corpus.tokenizer.size, dtype=np.uint32)
    words = _words(corpus)
    words = words[numbers.random(len(words)) < _RENAMED]
    words = words[: len(words) // _WINDOW * _WINDOW].reshape(-1, _WINDOW)
    table[words] = numbers.permuted(words, axis=1)
    return table


@cache
def _words(corpus: Corpus) -> Ids:
    return corpus.tokenizer.words()


@cache
def _numbered(corpus: Corpus, number: int) -> Ids:
    return corpus.tokenizer.encode(f"{number:6d}\t")
