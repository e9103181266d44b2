"""Server-sent events, as inference servers stream replies."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator


async def events(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The data of each event. Lines may be of any length: a prompt's ids stand in one."""
    rest = b""
    data: list[bytes] = []
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
    if data:
        yield b"\n".join(data)
