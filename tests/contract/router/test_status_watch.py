"""``outrider status --watch`` on a terminal of its own, against a router."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import Any

import pytest

CLI = (sys.executable, "-P", "-m", "outrider.cluster.cli", "status")
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """The command on a terminal; ``text`` is what that was sent so far, ``read`` gives it without control sequences."""

    def __init__(self, *args: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "PYTHONSAFEPATH": "1"}
        environment.pop("OUTRIDER_ADDRESS", None)
        # In a terminal's foreground Ctrl-C ends programs; tests that run in the background of a shell are deaf to it.
        command = ["env", "--default-signal=INT", *CLI, *args]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self.text = ""

    def read(self) -> str:
        with contextlib.suppress(BlockingIOError, OSError):  # nothing there; or its end
            while part := os.read(self._ours, 1 << 16):
                self.text += part.decode(errors="replace")
        return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", self.text)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        os.close(self._ours)


@pytest.fixture
def terminals() -> Iterator[Any]:
    made: list[Terminal] = []

    def make(*args: str) -> Terminal:
        made.append(Terminal(*args))
        return made[-1]

    yield make
    for terminal in made:
        terminal.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_table_follows_the_router_until_it_is_told_to_end(
    world: Any, terminals: Any, number: signal.Signals
) -> None:
    await world.target()
    server = await world.router()
    client = await world.client(server)
    terminal = terminals("--watch", "--interval", "0.1", "--address", server.address)
    await world.until(lambda: " ready " in terminal.read(), "a table", 60.0)
    await client.generate("Once upon", max_tokens=5, temperature=0.0)
    steps = (await client.status())["groups"][0]["steps"]
    assert steps > 0
    await world.until(lambda: re.search(rf"\b{steps}\b", terminal.read()), "the new number of steps", 60.0)
    await server.stop(0.0)
    await world.until(lambda: "the facts above are old" in terminal.read(), "the loss is told", 60.0)
    terminal.process.send_signal(number)
    async with asyncio.timeout(60):
        assert await asyncio.to_thread(terminal.process.wait) == 0
    terminal.read()
    assert terminal.text.rfind(SHOW_CURSOR) > terminal.text.rfind(HIDE_CURSOR) >= 0
    assert "Traceback" not in terminal.text
    assert not re.search(r"^error:", terminal.read(), re.MULTILINE)


async def test_a_router_that_never_answers_is_an_error(world: Any, terminals: Any) -> None:
    await world.target()
    server = await world.router()
    await server.stop(0.0)
    terminal = terminals("--watch", "--address", server.address)
    async with asyncio.timeout(60):
        assert await asyncio.to_thread(terminal.process.wait) == 1
    assert f"error: no answer from {server.address}" in terminal.read()


@pytest.mark.parametrize(
    ("args", "words"),
    [(["--watch", "--json"], "does not go with --json"), (["--watch"], "needs a terminal")],
)
def test_what_a_watch_needs(args: list[str], words: str) -> None:
    done = subprocess.run([*CLI, *args, "--address", "h:1"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
