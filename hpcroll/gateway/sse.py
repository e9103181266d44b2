"""Server-sent events, as inference servers stream replies."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator


async def events(chunks: AsyncIterable[bytes]) -> AsyncIterator[list[bytes]]:
    """The data of the events that each chunk completes, where it completes any.

    Lines may be of any length: a prompt's ids stand in one.
    """
    rest = b""
    data: list[bytes] = []
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        complete = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                complete.append(b"\n".join(data))
                data = []
        if complete:
            yield complete
    if data:
        yield [b"\n".join(data)]
