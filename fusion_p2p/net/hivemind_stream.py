"""A `Stream` over p2pd: bytes to and from its Unix socket."""

from __future__ import annotations

import asyncio
import time

from fusion_p2p.errors import StreamClosed
from fusion_p2p.ids import PeerId
from fusion_p2p.net.hivemind_control import ControlSocket, RawStream
from fusion_p2p.wire.frames import MAX_CHUNK_BYTES

CLOSE_TIMEOUT_S = 1.0


class HivemindStream:
    """A stream as p2pd handed it over. `control`: of the same p2pd."""

    def __init__(self, raw: RawStream, control: ControlSocket) -> None:
        self._raw, self._control = raw, control

    @property
    def remote(self) -> PeerId:
        return self._raw.remote

    @property
    def address(self) -> str:
        """Where the other end is, as our daemon sees it; through a relay it ends in /p2p-circuit."""
        return self._raw.address

    async def read_exactly(self, count: int) -> bytes:
        try:
            data = await self._raw.reader.readexactly(count)
        except (OSError, EOFError) as error:
            raise self._closed(error) from None
        self._control.carried_at = time.monotonic()
        return data

    async def read_some(self, buffer: memoryview) -> int:
        try:
            data = await self._raw.reader.read(len(buffer))
        except OSError as error:
            raise self._closed(error) from None
        if not data and len(buffer):
            raise self._closed(EOFError())
        self._control.carried_at = time.monotonic()
        buffer[: len(data)] = data
        return len(data)

    async def read_into(self, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            filled += await self.read_some(buffer[filled:])

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        writer, view = self._raw.writer, memoryview(data)
        try:
            for start in range(0, len(view), MAX_CHUNK_BYTES):
                writer.write(view[start : start + MAX_CHUNK_BYTES])
                await writer.drain()
        except (OSError, RuntimeError) as error:  # RuntimeError: asyncio's word for a transport that is closed already
            raise self._closed(error) from None

    async def close(self) -> None:
        writer = self._raw.writer
        writer.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await writer.wait_closed()
        except TimeoutError:
            writer.transport.abort()
        except OSError:
            return  # the other side was first

    def abort(self) -> None:
        """End the stream at once, whatever was still to be sent."""
        self._raw.writer.transport.abort()

    def _closed(self, error: Exception) -> StreamClosed:
        return StreamClosed(f"{self.remote} closed the stream {self._raw.protocol} ({type(error).__name__})")
