"""The attendant's parts: frames, captured output, and the guard before a kill of everything."""

from __future__ import annotations

import os
import random
import socket

import pytest

from hpcroll.sandboxes.attendant import processes, wire
from hpcroll.sandboxes.attendant.streams import Capture


def test_a_frame_survives_being_cut_anywhere() -> None:
    generator = random.Random(7)
    for _ in range(50):
        body = generator.randbytes(generator.randrange(3000))
        data = wire.encode({"n": generator.random(), "text": "é\u2028"}, body)
        decoder, found, position = wire.Decoder(), None, 0
        while position < len(data):
            assert found is None
            step = generator.randrange(1, 700)
            found = decoder.feed(data[position : position + step])
            position += step
        assert found is not None
        assert found[1] == body
        assert found[0]["text"] == "é\u2028"


def test_descriptors_arrive_with_their_frame_and_are_not_inherited() -> None:
    left, right = socket.socketpair()
    reader, writer = os.pipe()
    with left, right:
        wire.send(left, {"op": "x"}, b"body", fds=[reader])
        os.close(reader)
        frame = wire.receive(right)
        assert frame is not None
        header, body, fds = frame
        assert (header, body, len(fds)) == ({"op": "x"}, b"body", 1)
        assert not os.get_inheritable(fds[0])
        os.write(writer, b"through")
        assert os.read(fds[0], 10) == b"through"
        os.close(fds[0])
        os.close(writer)
        left.close()
        assert wire.receive(right) is None


@pytest.mark.parametrize("cap", [0, 1, 2, 7, 1000, 1 << 20])
def test_captured_output_is_its_beginning_and_its_end(cap: int) -> None:
    generator = random.Random(cap)
    for size in (0, 1, cap // 2, max(0, cap - 1), cap, cap + 1, 3 * cap + 200_000):
        data = generator.randbytes(size)
        capture = Capture(cap)
        position = 0
        while position < size:
            step = generator.randrange(1, 1 << 16)
            capture.add(data[position : position + step])
            position += step
        kept = capture.kept()
        capture.close()
        assert capture.total_bytes == size
        head = cap - cap // 2
        assert kept == (data if size <= cap else data[:head] + data[size - cap // 2 :])


def test_draining_ends_though_somebody_holds_the_pipe_open() -> None:
    capture = Capture(100)
    os.write(capture.writer, b"x" * 50)
    capture.drain()
    assert capture.kept() == b"x" * 50
    capture.close()


def test_everything_is_killed_by_process_one_of_a_namespace_only() -> None:
    with pytest.raises(RuntimeError, match="process 1"):
        processes.kill_namespace()
