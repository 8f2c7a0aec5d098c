"""A TCP relay that delays what goes through it by a fixed time, in order: a link with latency and full bandwidth."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time


class Relay:
    """Listens on ``address`` and connects each client to ``target``. Use it as a context manager.

    Attributes:
        delay_s: delay of each direction, (towards the target, back). May be changed while it runs.
        num_bytes: what went through, in both directions.
    """

    def __init__(self, target: str, delay_s: tuple[float, float] = (0.0, 0.0)) -> None:
        self.target = target
        self.delay_s = delay_s
        self.address = ""
        self.num_bytes = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Relay:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{port}"

    async def _close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        host, port = self.target.rsplit(":", 1)
        with contextlib.suppress(OSError):
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._carry(reader, there_writer, 0))
                    group.create_task(self._carry(there_reader, writer, 1))
            except* OSError:  # one side broke: so does the other
                pass
            finally:
                there_writer.close()
        writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: int) -> None:
        """Everything from one socket to another, each piece late by the delay that held when it came."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, piece = await pieces.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if not piece:
                    writer.write_eof()
                    return
                writer.write(piece)
                await writer.drain()

        delivering = asyncio.create_task(deliver())
        try:
            while True:
                piece = await reader.read(1 << 16)
                self.num_bytes += len(piece)
                pieces.put_nowait((time.monotonic() + self.delay_s[direction], piece))
                if not piece:
                    break
            await delivering
        finally:
            delivering.cancel()
