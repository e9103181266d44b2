"""One stream over both levels: whatever is packed and deleted meanwhile, each committed rollout once."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcroll.errors import ConfigError
from hpcroll.fs import publish
from hpcroll.shards import RunReader, ShardWriter, open_run
from hpcroll.shards.format.frames import FrameKind, parse_header
from hpcroll.shards.level1.cursors import Cursors
from hpcroll.shards.level1.packer import Packer, PackOptions
from hpcroll.shards.level1.retention import Retention
from tests.shard_runs import SEGMENT, ShardRun, bulk, trajectory

GROUP_SIZE = 4
USABLE: dict[str, Any] = {"trainable": True, "not_trainable_because": ()}


def ordinals(stored: Any) -> list[int]:
    return [item.ref.ordinal for item in stored]


def pack(run: ShardRun, **options: Any) -> int:
    return len(Packer(run.paths, PackOptions(**options)).pack().packs)


def retain(run: ShardRun) -> list[str]:
    return Retention(run.paths).retain().deleted


@pytest.fixture
def run(tmp_path: Path) -> ShardRun:
    return ShardRun.create(tmp_path / "run")


class Workers:
    """Workers that append, commit, lose and die, as chance has it."""

    def __init__(self, run: ShardRun, chance: random.Random) -> None:
        self.run = run
        self.chance = chance
        self.committed: set[int] = set()
        self._writers: dict[str, ShardWriter] = {}
        self._open: list[tuple[str, Any]] = []
        self._next = 0
        self._born = 0
        for _ in range(2):
            self._begin()

    def append(self) -> None:
        for _ in range(self.chance.randint(1, 4)):
            ordinal, self._next = self._next, self._next + 1
            big = bulk(ordinal) if self.chance.random() < 0.3 else {"turns": 1}
            # Now and then two workers try the same rollout: one of them will have lost.
            tries = 2 if self.chance.random() < 0.2 else 1
            for incarnation in self.chance.sample(sorted(self._writers), tries):
                record = trajectory(ordinal, incarnation=incarnation, **big)
                self._open.append((incarnation, self._writers[incarnation].append(record)))

    def commit(self, share: float = 0.7) -> None:
        chosen = [item for item in self._open if self.chance.random() < share]
        for item in chosen:
            incarnation, address = item
            self._open.remove(item)
            self._writers[incarnation].sync()
            if self.run.confirm(address.ref.ordinal, incarnation):
                self.committed.add(address.ref.ordinal)
                if self.chance.random() < 0.8:
                    self._writers[incarnation].mark([address])

    def die(self) -> None:
        incarnation = self.chance.choice(sorted(self._writers))
        self._writers.pop(incarnation).close()
        self._open = [item for item in self._open if item[0] != incarnation]
        self.run.end(incarnation)
        self._begin()

    def finish(self) -> None:
        self.commit(share=1.0)
        for writer in self._writers.values():
            writer.close()

    def _begin(self) -> None:
        incarnation = f"w{self.chance.randrange(10)}-{self._born}"
        self._born += 1
        self._writers[incarnation] = self.run.writer(incarnation, shard_mb=1)


class Follower:
    """A reader that stops anywhere, saves, crashes, and goes on from what it saved."""

    def __init__(self, run: ShardRun, chance: random.Random, **settings: Any) -> None:
        self.run = run
        self.chance = chance
        self.settings = settings
        self.delivered: list[int] = []
        self.reader = self._open()
        self._saved: tuple[Any, list[int]] = (self.reader.state_dict(), [])

    def items(self) -> Iterator[list[int]]:
        """What is delivered at once."""
        return ([stored.ref.ordinal] for stored in self.reader)

    def read(self) -> None:
        wanted = self.chance.choice([0, 1, 3, 10, 1000])
        for taken, item in enumerate(self.items(), start=1):
            self.delivered += item
            if taken >= wanted:
                break

    def save(self) -> None:
        self._saved = (json.dumps(self.reader.state_dict()), list(self.delivered))

    def crash(self) -> None:
        state, delivered = self._saved
        self.delivered = list(delivered)
        self.reader = self._open()
        if isinstance(state, str):
            self.reader.load_state_dict(json.loads(state))

    def finish(self) -> None:
        for item in self.items():
            self.delivered += item

    def _open(self) -> RunReader:
        return open_run(self.run.paths.root, columns=["tokens"]).follow(stop=lambda: True, **self.settings)


class GroupFollower(Follower):
    def items(self) -> Iterator[list[int]]:
        return (ordinals(group.members) for group in self.reader.groups())


def complete_groups(committed: set[int]) -> set[int]:
    sizes = Counter(ordinal // GROUP_SIZE for ordinal in committed)
    return {ordinal for ordinal in committed if sizes[ordinal // GROUP_SIZE] == GROUP_SIZE}


ACTIONS = ("append", "append", "commit", "commit", "die", "pack", "retain", "read", "read", "save", "crash")


@settings(max_examples=25, deadline=None, print_blob=True)
@given(actions=st.lists(st.sampled_from(ACTIONS), min_size=10, max_size=60), seed=st.integers(0, 2**32))
def test_every_committed_rollout_is_read_once_whatever_happens_between(actions: list[str], seed: int) -> None:
    with TemporaryDirectory() as folder:
        chance = random.Random(seed)
        run = ShardRun.create(Path(folder) / "run")
        workers = Workers(run, chance)
        followers = [Follower(run, chance), GroupFollower(run, chance)]
        for action in actions:
            if action == "pack":
                pack(run, everything=chance.random() < 0.3, target_mb=chance.choice([0.1, 256]))
            elif action == "retain":
                retain(run)
            elif hasattr(workers, action):
                getattr(workers, action)()
            else:
                getattr(chance.choice(followers), action)()
        workers.finish()
        for follower in followers:
            follower.finish()
        assert Counter(followers[0].delivered) == Counter(workers.committed)
        assert Counter(followers[1].delivered) == Counter(complete_groups(workers.committed))
        pack(run, everything=True)
        retain(run)
        assert sorted(ordinals(open_run(run.paths.root, columns=[]))) == sorted(workers.committed)


def commit_groups(run: ShardRun, groups: range, *, incarnation: str = "w0", end: bool = True) -> None:
    with run.writer(incarnation, shard_mb=1) as writer:
        for n in range(groups.start * GROUP_SIZE, groups.stop * GROUP_SIZE):
            run.commit(writer, incarnation, [n], **USABLE, **bulk(n))
    if end:
        run.end(incarnation)


def test_packed_and_deleted_shards_are_read_from_their_packs(run: ShardRun) -> None:
    commit_groups(run, range(6))
    assert pack(run) == 1
    assert retain(run) == ["w0.0", "w0.1"]
    assert not list(run.paths.shards.iterdir())
    reader = open_run(run.paths.root)
    assert ordinals(reader) == list(range(24))
    for stored in reader:
        assert (
            stored.trajectory().record
            == trajectory(stored.ref.ordinal, **USABLE, **bulk(stored.ref.ordinal)).record
        )
    assert [ordinals(group.members) for group in reader.groups()] == [
        list(range(4 * n, 4 * n + 4)) for n in range(6)
    ]
    again = [batch.ids.tolist() for batch in reader.packed(4000)]
    assert sum(map(len, again)) > 0


def test_a_position_on_level_0_is_one_in_the_packs(run: ShardRun) -> None:
    commit_groups(run, range(6))
    whole = ordinals(open_run(run.paths.root))
    for taken in range(0, 25, 3):
        reader = open_run(run.paths.root).follow(stop=lambda: True)
        stream = iter(reader)
        head = ordinals(next(stream) for _ in range(taken))
        state = json.dumps(reader.state_dict())
        if not run.paths.pack_manifest(0).exists() and taken == 12:
            pack(run)
            retain(run)
        resumed = open_run(run.paths.root).follow(stop=lambda: True)
        resumed.load_state_dict(json.loads(state))
        assert sorted(head + ordinals(resumed)) == whole
    assert run.paths.pack_manifest(0).exists()


def test_a_position_within_a_pack_is_exact(run: ShardRun) -> None:
    commit_groups(run, range(4))
    pack(run)
    whole = ordinals(open_run(run.paths.root))
    for taken in range(17):
        reader = open_run(run.paths.root).follow(stop=lambda: True)
        stream = iter(reader)
        head = ordinals(next(stream) for _ in range(taken))
        resumed = open_run(run.paths.root).follow(stop=lambda: True)
        resumed.load_state_dict(json.loads(json.dumps(reader.state_dict())))
        assert head + ordinals(resumed) == whole


def test_state_stays_small_once_all_is_packed(run: ShardRun) -> None:
    for worker in range(5):
        commit_groups(run, range(worker, worker + 1), incarnation=f"w{worker}")
    reader = open_run(run.paths.root).follow(stop=lambda: True)
    assert len(ordinals(reader)) == 20
    assert len(reader.state_dict()["session"]["shards"]) == 5
    pack(run)
    retain(run)
    assert ordinals(reader) == []
    state = reader.state_dict()["session"]
    assert (state["pack"], state["shards"]) == ([1, 0], {})


def test_shard_deleted_while_it_is_read_is_finished_from_its_pack(run: ShardRun) -> None:
    commit_groups(run, range(12))
    stream = iter(open_run(run.paths.root))
    first = ordinals(next(stream) for _ in range(3))
    pack(run)
    assert len(retain(run)) == 3
    assert sorted(first + ordinals(stream)) == list(range(48))


def test_group_is_found_on_either_level_and_whole(run: ShardRun) -> None:
    commit_groups(run, range(4))
    commit_groups(run, range(4, 5), incarnation="w1", end=False)
    for packed in (False, True):
        if packed:
            pack(run)
            retain(run)
        reader = open_run(run.paths.root)
        for n in range(5):
            group = reader.group(f"{SEGMENT}/g{n}")
            assert ordinals(group.members) == list(range(4 * n, 4 * n + 4))
            assert (group.size, group.committed, group.complete) == (4, 4, True)
            for stored in group.members:
                assert reader.get(stored.rollout_id).record == stored.record


def test_steps_planned_on_level_0_are_loaded_from_packs(run: ShardRun) -> None:
    commit_groups(run, range(6))
    reader = open_run(run.paths.root).follow(trainer="grpo", stop=lambda: True)
    steps = list(reader.steps(groups=2, max_tokens=8000))
    before = [[batch.ids.tolist() for batch in step.batches] for step in steps]
    pack(run)
    assert Retention(run.paths, cursors=Cursors(run.paths)).retain(without=["grpo"]).deleted
    again = list(
        open_run(run.paths.root).follow(trainer="grpo", stop=lambda: True).steps(groups=2, max_tokens=8000)
    )
    assert [[batch.ids.tolist() for batch in step.batches] for step in again] == before


def test_damaged_block_costs_its_rows_and_the_reader_goes_on(run: ShardRun) -> None:
    commit_groups(run, range(40))
    pack(run)
    retain(run)
    (file,) = run.paths.packs.glob("*.pack")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    reader = open_run(run.paths.root)
    found = ordinals(reader)
    assert 0 < len(found) < 160
    assert reader.counts.corrupt == 1
    assert reader.counts.committed_lost == 160 - len(found)


def test_closed_run_is_followed_to_its_end_over_both_levels(run: ShardRun) -> None:
    commit_groups(run, range(3))
    pack(run)
    commit_groups(run, range(3, 5), incarnation="w1", end=False)
    publish(run.paths.closed, b"{}")
    assert sorted(ordinals(open_run(run.paths.root).follow(poll_s=0.01))) == list(range(20))


@pytest.mark.parametrize("packed", [False, True])
def test_parts_of_a_run_are_disjoint_complete_and_whole_groups(run: ShardRun, packed: bool) -> None:
    commit_groups(run, range(12))
    reader = open_run(run.paths.root)
    before = [ordinals(reader.split(rank, 3)) for rank in range(3)]
    if packed:
        pack(run)
        retain(run)
    parts = [ordinals(reader.split(rank, 3)) for rank in range(3)]
    assert [sorted(part) for part in parts] == [sorted(part) for part in before]
    assert sorted(n for part in parts for n in part) == list(range(48))
    assert all(len([n for n in part if n // 4 == group]) in (0, 4) for part in parts for group in range(12))
    assert sum(map(bool, parts)) > 1
    assert [len(reader.split(rank, 3)) for rank in range(3)] == [len(part) for part in parts]
    workers = [ordinals(reader.split(1, 3).split(worker, 2)) for worker in range(2)]
    assert sorted(workers[0] + workers[1]) == sorted(parts[1])
    groups = [group.group_id for rank in range(3) for group in reader.split(rank, 3).groups()]
    assert sorted(groups) == sorted(f"{SEGMENT}/g{n}" for n in range(12))
    with pytest.raises(ConfigError, match="part 3 is not one of the 3 parts"):
        reader.split(3, 3)
    with pytest.raises(ConfigError, match="use rank= and world="):
        reader.split(0, 2).follow()


@pytest.mark.parametrize("packed", [False, True])
def test_shuffled_groups_come_in_a_seeded_order_that_resumes_exactly(run: ShardRun, packed: bool) -> None:
    commit_groups(run, range(12))
    if packed:
        pack(run)
        retain(run)

    def shuffled(seed: int, window: int = 5) -> RunReader:
        return open_run(run.paths.root, columns=["tokens"], shuffle=seed, window=window)

    def told(groups: Any) -> list[int]:
        return [int(group.group_id.rpartition("g")[2]) for group in groups]

    order = told(shuffled(1).groups())
    assert sorted(order) == list(range(12))
    assert order == told(shuffled(1).groups()) != told(shuffled(2).groups())
    assert order != sorted(order)
    assert all(position >= group - 5 for position, group in enumerate(order))
    single = ordinals(shuffled(1))
    assert sorted(single) == list(range(48)) != single
    for taken in range(1, 12):
        reader = shuffled(1)
        stream = reader.groups()
        head = told(next(stream) for _ in range(taken))
        resumed = shuffled(1)
        resumed.load_state_dict(json.loads(json.dumps(reader.state_dict())))
        assert head + told(resumed.groups()) == order
    with pytest.raises(ConfigError, match="cannot be loaded"):
        shuffled(2).load_state_dict(reader.state_dict())
    with pytest.raises(ConfigError, match="window is 0"):
        shuffled(1, 0)


def test_named_follower_keeps_what_it_has_not_read_and_an_anonymous_one_writes_nothing(run: ShardRun) -> None:
    commit_groups(run, range(12))
    pack(run)
    list(open_run(run.paths.root).follow(stop=lambda: True))
    assert not list(run.paths.readers.iterdir())
    reader = open_run(run.paths.root).follow(trainer="grpo", stop=lambda: True)
    next(iter(reader))
    cursor = json.loads(run.paths.reader_cursor("grpo").read_bytes())
    assert (cursor["pack"], cursor["shards"], cursor["expires_s"]) == ([0, 1], {}, 3600.0)
    assert retain(run) == []
    again = open_run(run.paths.root).follow(trainer="grpo", stop=lambda: True)
    assert len(ordinals(again)) == 48
    latest = json.loads(run.paths.reader_cursor("grpo").read_bytes())
    assert latest["beat"] > cursor["beat"]
    # Although it has just beaten: at the end of its stream a follower always says where it stands.
    assert latest["pack"] == [1, 0]
    assert ordinals(again) == []
    assert len(retain(run)) == 3


def test_opens_and_listings_of_a_quiet_follower_are_few(run: ShardRun) -> None:
    for worker in range(8):
        commit_groups(run, range(worker, worker + 1), incarnation=f"w{worker}", end=False)
    rounds = 0

    def stop() -> bool:
        nonlocal rounds
        rounds += 1
        return rounds > 60

    reader = open_run(run.paths.root).follow(poll_s=0.01, stop=stop)
    assert len(ordinals(reader)) == 32
    assert reader.counts.opens < 400, "a look at everything in every round were 700"
    assert reader.counts.listings < 30


def open_shards(run: ShardRun) -> list[str]:
    """The level-0 shards that this process has open, deleted or not."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(descriptor.readlink()))
    return [link for link in links if link.startswith(f"{run.paths.shards}/") and ".shard" in link]


def test_follower_keeps_no_shard_open_that_retention_deleted(run: ShardRun) -> None:
    commit_groups(run, range(4))
    stopping = False
    reader = open_run(run.paths.root).follow(poll_s=0.01, stop=lambda: stopping)
    stream = iter(reader)
    had = next(stream)
    assert reader.get(had.rollout_id).rollout_id == had.rollout_id
    assert open_shards(run) != [], "the next one is read faster where the last one was"
    pack(run)
    assert retain(run) == ["w0.0"]
    stopping = True
    assert len(ordinals(stream)) == 15
    assert reader.get(had.rollout_id).rollout_id == had.rollout_id
    assert open_shards(run) == []


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("packed", [False, True])
def test_damaged_tokens_cost_their_rollouts_in_groups_and_steps_too(run: ShardRun, packed: bool) -> None:
    with run.writer("w0") as writer:
        addresses = run.commit(writer, "w0", range(16), **USABLE)
    run.end("w0")
    if packed:
        pack(run, target_mb=0.01)
        retain(run)
        (path, *_) = sorted(run.paths.packs.glob("*.pack"))
        flip(path, path.stat().st_size // 3)
    else:
        header = parse_header(run.paths.shard_file("w0", 0).read_bytes()[addresses[5].offset :])
        assert header is not None
        frame = header.frame(FrameKind.TOKENS)
        flip(run.paths.shard_file("w0", 0), addresses[5].offset + frame.start + 3)
    reader = open_run(run.paths.root, columns=["tokens"])
    kept = set(ordinals(reader))
    lost = reader.counts.committed_lost
    assert len(kept) == 16 - lost < 16
    groups = list(reader.groups("any"))
    assert {n for group in groups for n in ordinals(group.members)} == kept
    assert reader.counts.committed_lost == lost
    steps = list(reader.steps(groups=1, max_tokens=8000))
    rollouts = {str(name) for step in steps for batch in step.batches for name in batch.rollout_id}
    assert rollouts <= {f"{SEGMENT}/{n}" for n in kept}
    assert [g.group_id for step in steps for g in step.groups] == [
        f"{SEGMENT}/g{n}" for n in range(4) if {4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3} <= kept
    ]


def test_row_that_is_damaged_after_it_was_planned_is_left_out_and_counted(run: ShardRun) -> None:
    with run.writer("w0") as writer:
        addresses = run.commit(writer, "w0", range(8), **USABLE)
    run.end("w0")
    publish(run.paths.closed, b"{}")

    def steps() -> tuple[RunReader, list[int]]:
        reader = open_run(run.paths.root).follow(trainer="grpo")
        return reader, [len(b) for s in reader.steps(groups=1, max_tokens=8000) for b in s.batches]

    _, whole = steps()
    flip(run.paths.shard_file("w0", 0), addresses[5].offset + addresses[5].length // 2)
    reader, damaged = steps()
    assert len(damaged) == len(whole), "every rank still has as many micro-batches"
    assert sum(damaged) < sum(whole)
    assert (reader.counts.corrupt, reader.counts.committed_lost) == (1, 1)
