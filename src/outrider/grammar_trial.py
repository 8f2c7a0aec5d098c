"""Where grammars of strangers are compiled for the first time: in a process of its own, with bounds.

llguidance bounds most of what a grammar may cost, but not all: a few hundred bytes of JSON schema can keep its compiler
busy for ever, or fill the memory, and a chain of rules can overflow its stack, which ends the process. So the door
tries every grammar in a child process first. The child has a small stack, little memory and few seconds; whatever
passes there passes elsewhere with ease.

The child speaks lines of JSON: ``{"kind": ..., "text": ...}`` comes in, ``{"value": ..., "limit": ...}`` (a fault) or
``{}`` goes out. It ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from outrider.core.errors import InvalidRequest, Unavailable
from outrider.core.grammar import Grammar, GrammarKind

CPU_S = 5
# On a busy machine the processor time above may take longer.
DEADLINE_S = 20.0
START_DEADLINE_S = 60.0
EXTRA_MEMORY = 256 << 20
STACK_BYTES = 2 << 20
# Children at once: a grammar that takes long holds up others only where that many do.
MAX_CHILDREN = 4


class Trials:
    """A few children, started when they are needed and again after one died. Any thread may call ``fault``."""

    def __init__(self, model_dir: str | Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._arguments = [str(model_dir), str(vocab_size), *(str(token) for token in eos_token_ids)]
        self._idle: list[_Child] = []
        self._slots = threading.BoundedSemaphore(MAX_CHILDREN)
        self._closed = weakref.finalize(self, _close_all, self._idle)

    def fault(self, grammar: Grammar) -> InvalidRequest | None:
        """Why a grammar is refused, or None. Raises ``Unavailable`` where no child can be started."""
        field = f"sampling.grammar.{grammar.kind.value}"
        with self._slots:
            child = self._idle.pop() if self._idle else _Child(self._arguments)
            try:
                answer = child.ask({"kind": grammar.kind.value, "text": grammar.text})
            except (OSError, TimeoutError, ValueError):
                child.close()
                limit = f"one that compiles within {CPU_S} seconds and {EXTRA_MEMORY >> 20} MiB"
                return InvalidRequest(field, grammar.text[:80], limit)
            self._idle.append(child)
        return InvalidRequest(field, answer["value"], answer["limit"]) if answer else None

    def close(self) -> None:
        """End the children."""
        self._closed()


class _Child:
    def __init__(self, arguments: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outrider.grammar_trial", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._read_line(START_DEADLINE_S)  # it is ready
        except (OSError, TimeoutError) as error:
            self.close()
            raise Unavailable(
                f"grammars cannot be checked: the process that tries them did not start: {error}"
            ) from error

    def ask(self, question: dict[str, str]) -> dict[str, str]:
        """Raises ``OSError``, ``TimeoutError`` or ``ValueError`` where the child is of no further use."""
        if self._process.stdin is None:
            raise OSError("no pipe")
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()
        answer: dict[str, str] = json.loads(self._read_line(DEADLINE_S))
        return answer

    def close(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not written yet
                    pipe.close()
        self._process.wait()

    def _read_line(self, deadline_s: float) -> bytes:
        if self._process.stdout is None:
            raise OSError("no pipe")
        end, line = time.monotonic() + deadline_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise TimeoutError(f"no answer in {deadline_s:g} s")
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    raise OSError("the process ended")
                line += part
        return line


def _close_all(children: list[_Child]) -> None:
    while children:
        children.pop().close()


def _limit_memory() -> None:
    """Let this process have ``EXTRA_MEMORY`` more than it has now, where the system can tell."""
    status = Path("/proc/self/status")
    if status.exists():
        held = next(line for line in status.read_text().splitlines() if line.startswith("VmData"))
        limit = (int(held.split()[1]) << 10) + EXTRA_MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _limit_time() -> None:
    """Let this process compute for ``CPU_S`` more seconds; then the system ends it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + CPU_S, hard))


def _serve(arguments: Sequence[str]) -> None:
    from outrider.grammar import GrammarCompiler

    model_dir, vocab_size, *eos_token_ids = arguments
    compiler = GrammarCompiler(model_dir, int(vocab_size), [int(token) for token in eos_token_ids])
    with contextlib.suppress(InvalidRequest):  # it will be said of each grammar then
        compiler.compile(Grammar(GrammarKind.REGEX, "a"))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory()
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        _limit_time()
        question = json.loads(line)
        answer: dict[str, str] = {}
        try:
            compiler.compile(Grammar(GrammarKind(question["kind"]), question["text"]))
        except InvalidRequest as error:
            answer = {"value": str(error.value), "limit": error.limit}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.argv[1:],))
    thread.start()
    thread.join()
