"""The journal holds every call whole, in space that grows with the work, whatever happens to its end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from random import Random

import numpy as np
import pytest

from hpcroll.contract import Call, CallTokens, LogprobKind, RecordedCall
from hpcroll.errors import CorruptRecordError, SpoolError
from hpcroll.gateway import Journal, read_journal, unfold_messages
from hpcroll.gateway.prefix import MessageFolder

SESSION = "0123456789abcdef/7"


def recorded(index: int, prompt: list[int], sampled: list[int], *, rollout: str = SESSION) -> RecordedCall:
    call = Call(
        call_index=index,
        rollout_id=rollout,
        attempt=1,
        dialect="openai_chat",
        model_name="policy",
        endpoint="http://gpu:8000",
        started_at=1.5,
        logprob_kind=LogprobKind.RAW,
    )
    logprobs = -np.arange(1, len(sampled) + 1, dtype=np.float32) / 3
    return RecordedCall(call, CallTokens(np.array(prompt, np.uint32), np.array(sampled, np.uint32), logprobs))


def conversation(turns: int, *, seed: int = 0, rollout: str = SESSION) -> list[RecordedCall]:
    """A growing conversation that is now and then rewritten, and a second one between its turns."""
    random = Random(seed)
    ids = lambda count: [random.randrange(1 << 32) for _ in range(count)]  # noqa: E731
    main, other, calls = ids(500), ids(300), []
    for index in range(turns):
        line = other if index % 5 == 4 else main
        sampled = ids(random.randrange(1, 40))
        calls.append(recorded(index, list(line), sampled, rollout=rollout))
        line += sampled + ids(50)
        if index % 7 == 6:
            line[-60:] = ids(20)
    return calls


def write(path: Path, calls: list[RecordedCall]) -> None:
    async def run() -> None:
        journal = Journal(path)
        journal.open()
        for call in calls:
            await journal.append(call)
        await journal.close()

    asyncio.run(run())


def assert_equal(left: RecordedCall, right: RecordedCall) -> None:
    assert left.call == right.call
    for name in ("prompt_ids", "sampled_ids", "logprobs"):
        ours, theirs = getattr(left.tokens, name), getattr(right.tokens, name)
        assert ours.dtype == theirs.dtype
        assert ours.tobytes() == theirs.tobytes()


def test_every_call_is_read_back_with_its_whole_prompt(tmp_path: Path) -> None:
    calls = conversation(60)
    write(tmp_path / "j", calls)
    for ours, theirs in zip(calls, read_journal(tmp_path / "j"), strict=True):
        assert_equal(ours, theirs)


def test_journal_grows_with_the_work_and_not_with_the_square_of_the_turns(tmp_path: Path) -> None:
    sizes = []
    for turns in (20, 40, 80):
        write(tmp_path / str(turns), conversation(turns))
        sizes.append((tmp_path / str(turns)).stat().st_size)
    assert sizes[2] - sizes[1] < 2.5 * (sizes[1] - sizes[0])


def test_reading_one_attempt_ignores_all_others(tmp_path: Path) -> None:
    mine, theirs = conversation(12), conversation(12, seed=1, rollout="0123456789abcdef/8")
    write(tmp_path / "j", [call for pair in zip(mine, theirs, strict=True) for call in pair])
    found = list(read_journal(tmp_path / "j", rollout_id=SESSION, attempt=1))
    for ours, read in zip(mine, found, strict=True):
        assert_equal(ours, read)
    assert len(list(read_journal(tmp_path / "j", rollout_id=SESSION))) == 12
    assert list(read_journal(tmp_path / "j", rollout_id=SESSION, attempt=2)) == []


def test_whatever_byte_a_killed_writer_stopped_at_the_calls_before_it_are_read(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, conversation(6))
    data = path.read_bytes()
    ends, random = [], Random(3)
    for count in range(1, 7):
        write(tmp_path / f"first{count}", conversation(6)[:count])
        ends.append((tmp_path / f"first{count}").stat().st_size)
    for cut in [*random.sample(range(len(data)), 60), *ends]:
        path.write_bytes(data[:cut])
        assert len(list(read_journal(path))) == sum(end <= cut for end in ends)
        path.write_bytes(data[:cut] + bytes(64))
        assert len(list(read_journal(path))) == sum(end <= cut for end in ends)


def test_a_flipped_bit_with_whole_records_behind_it_is_reported_after_the_good_ones(tmp_path: Path) -> None:
    path = tmp_path / "j"
    write(path, conversation(3))
    first = path.stat().st_size
    path.unlink()
    write(path, conversation(9))
    data = bytearray(path.read_bytes())
    for place in (first, first + 5, first + 9, first + 30):
        damaged = bytearray(data)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        reader = read_journal(path)
        assert [next(reader).call.call_index for _ in range(3)] == [0, 1, 2]
        with pytest.raises(CorruptRecordError, match=str(path)):
            next(reader)


def test_appends_that_wait_together_share_an_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsyncs = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (fsyncs.append(descriptor), real(descriptor)))

    async def run() -> None:
        journal = Journal(tmp_path / "j")
        journal.open()
        calls = [recorded(index, [1, 2, 3], [4]) for index in range(200)]
        await asyncio.gather(*(journal.append(call) for call in calls))
        await journal.close()

    asyncio.run(run())
    assert len(list(read_journal(tmp_path / "j"))) == 200
    assert 1 <= len(fsyncs) < 100


def test_calls_of_a_session_take_memory_for_what_is_new_in_each(tmp_path: Path) -> None:
    held = []
    for turns in (50, 100, 200):
        calls = conversation(turns, seed=turns)
        journal = Journal(tmp_path / "j")
        folded = [journal.fold(call) for call in calls]
        held.append(sum(call.tokens.folded is None for call in folded))
        tails = sum(len(call.tokens.folded.tail) for call in folded if call.tokens.folded is not None)
        assert tails < 100 * turns
        for ours, theirs in zip(folded, calls, strict=True):
            assert_equal(ours, theirs)
            assert ours.tokens.prompt_length == len(theirs.tokens.prompt_ids)
            tail = ours.tokens.folded.tail if ours.tokens.folded is not None else None
            assert tail is None or tail.base is None  # not a view that holds the whole prompt
        assert journal.fold(folded[-1]) is folded[-1]
    assert held == [2, 2, 2]  # the first prompt of either conversation


def test_prompt_that_builds_on_a_call_that_was_lost_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = [True]
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        if fail[0]:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    calls = conversation(12)

    async def run() -> list[RecordedCall]:
        journal = Journal(tmp_path / "j")
        journal.open()
        folded = [journal.fold(call) for call in calls]
        with pytest.raises(SpoolError):
            await journal.append(folded[0])
        fail[0] = False
        for call in folded[1:]:
            await journal.append(call)
        await journal.close()
        return folded

    folded = asyncio.run(run())
    assert folded[1].tokens.folded is not None
    for ours, theirs in zip(calls[1:], read_journal(tmp_path / "j"), strict=True):
        assert_equal(ours, theirs)


def test_append_returns_only_after_the_bytes_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced_bytes = []
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        real(descriptor)
        synced_bytes.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fdatasync", fdatasync)

    async def run() -> None:
        journal = Journal(tmp_path / "j")
        journal.open()
        for index in range(5):
            await journal.append(recorded(index, [1, 2, 3], [4]))
            assert synced_bytes[-1] == (tmp_path / "j").stat().st_size
        await journal.close()

    asyncio.run(run())


def test_a_write_that_fails_loses_no_later_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail = [False]
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        if fail[0]:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)

    async def run() -> None:
        journal = Journal(tmp_path / "j")
        journal.open()
        await journal.append(recorded(0, [1, 2, 3], [4]))
        fail[0] = True
        lost = [
            journal.append(recorded(1, [1, 2, 3, 4, 5], [6])),
            journal.append(recorded(9, [1, 2, 3, 4, 5, 6], [6])),
        ]
        for outcome in await asyncio.gather(*lost, return_exceptions=True):
            assert isinstance(outcome, SpoolError)
        fail[0] = False
        await journal.append(recorded(2, [1, 2, 3, 4, 5, 6, 7], [8]))
        await journal.close()

    asyncio.run(run())
    found = list(read_journal(tmp_path / "j"))
    assert [(call.call.call_index, call.tokens.prompt_ids.tolist()) for call in found] == [
        (0, [1, 2, 3]),
        (2, [1, 2, 3, 4, 5, 6, 7]),
    ]


def test_cancelled_append_is_written_all_the_same(tmp_path: Path) -> None:
    async def run() -> None:
        journal = Journal(tmp_path / "j")
        journal.open()
        waiting = asyncio.ensure_future(journal.append(recorded(0, [1], [2])))
        await asyncio.sleep(0)
        waiting.cancel()
        await journal.append(recorded(1, [1, 2, 3], [4]))
        await journal.close()

    asyncio.run(run())
    assert [call.call.call_index for call in read_journal(tmp_path / "j")] == [0, 1]


def test_second_journal_of_an_incarnation_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "j", [])
    with pytest.raises(SpoolError, match="cannot be created"):
        Journal(tmp_path / "j").open()


def test_messages_are_unfolded_to_what_each_request_held() -> None:
    random, folder, calls, requests = Random(5), MessageFolder(), [], []
    # Three agents take turns; now and then one forgets, and now and then a reply does not come.
    histories: list[list[object]] = [[{"role": "user", "content": name}] for name in "abc"]
    for index in range(120):
        history = random.choice(histories)
        delta = folder.fold(index, history)
        requests.append(list(history))
        reply = {"role": "assistant", "content": str(index)} if random.random() < 0.8 else None
        update = {
            "messages_base": delta.base,
            "messages_from": delta.keep,
            "messages": delta.new,
            "reply": reply,
        }
        calls.append(recorded(index, [1], [2]).call.model_copy(update=update))
        folder.reply(index, reply)
        if reply is not None:
            history.append(reply)
        history.append({"role": "user", "content": f"u{index}"})
        if random.random() < 0.1:
            del history[random.randrange(1, len(history)) :]
    assert unfold_messages(calls) == requests
    assert sum(len(call.messages) for call in calls) < 2 * len(calls) < sum(map(len, requests)) / 2
    with pytest.raises(ValueError, match="earlier call is missing"):
        unfold_messages(calls[60:])


def test_request_says_whether_it_goes_on_from_a_reply() -> None:
    folder = MessageFolder()
    asked, reply, more = "q", "a", "m"
    assert not folder.fold(0, [asked]).is_next
    folder.reply(0, reply)
    going_on = folder.fold(1, [asked, reply, more])
    assert (going_on.base, going_on.keep, going_on.new, going_on.is_next) == (0, 2, (more,), True)
    edited = folder.fold(2, [asked, "b", more])
    assert (edited.base, edited.keep, edited.is_next) == (1, 1, False)
