"""Other servers on the same model, prompts and precision, as arms of the same run.

Each runs as a process of its own on a free port of this machine, with greedy decoding and as many slots as requests are
sent at once, and is stopped while it is another's turn: some keep a processor busy with waiting. What is not installed
is left out, with one line that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from outrider.bench.peers.process import PeerProcess, has_module
from outrider.bench.peers.protocols import COMPLETIONS, LLAMA_CPP, Asking, Protocol, ToPeer
from outrider.bench.run import Arm
from outrider.client import ConfigError

NAMES = ("llama.cpp", "vllm", "transformers")
START_TIMEOUT_S = 600.0
MAX_AT_ONCE = 256  # requests; more wait here
SERVER = Path(__file__).resolve().parent / "transformers_server.py"


@dataclass(frozen=True)
class PeerSettings:
    """Which peers, and what they run.

    Attributes:
        names: each with the path that was given for it: of llama-server, or of a Python.
        slots: requests at once.
        asking: what holds for every request.
        draft_model, draft_gguf: a draft for those that can use one, which then propose ``num_draft_tokens`` each round.
    """

    names: tuple[tuple[str, str | None], ...]
    model: Path | None
    gguf: Path | None
    dtype: str
    threads: int
    slots: int
    asking: Asking
    draft_model: Path | None = None
    draft_gguf: Path | None = None
    num_draft_tokens: int = 4

    @staticmethod
    def parse(words: Sequence[str], model: Path | None, gguf: Path | None, **others: Any) -> PeerSettings:
        """From ``NAME`` or ``NAME=PATH``. Raises ``ConfigError``."""
        names: dict[str, str | None] = {}
        for word in words:
            name, _, path = word.partition("=")
            if name not in NAMES:
                raise ConfigError(f"no peer {name!r}: there are {', '.join(NAMES)}")
            names[name] = path or None
        if names.keys() & {"vllm", "transformers"} and (model is None or not model.is_dir()):
            raise ConfigError("vllm and transformers need the folder of the model: --peer-model DIR")
        if "llama.cpp" in names and (gguf is None or not gguf.is_file()):
            raise ConfigError("llama.cpp needs the model as a GGUF file: --peer-gguf FILE")
        return PeerSettings(tuple(names.items()), model, gguf, **others)


@dataclass(frozen=True)
class Launch:
    """How a peer is started; ``{port}`` in the command stands for its port."""

    name: str
    command: tuple[str, ...]
    protocol: Protocol
    environment: Mapping[str, str | None]


def launches(settings: PeerSettings, tell: Callable[[str], None]) -> list[Launch]:
    """Those that are installed; ``tell`` hears of each other one why it is left out."""
    found = []
    for name, path in settings.names:
        launch = _MAKERS[name](settings, path)
        if isinstance(launch, str):
            tell(f"left out: {name}: {launch}")
        else:
            found.append(launch)
    return found


class Peers:
    """Started peers as arms; use it as an async context manager. Ending it ends their processes."""

    def __init__(self, settings: PeerSettings, tell: Callable[[str], None]) -> None:
        self._settings = settings
        self._tell = tell
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> list[Arm]:
        arms = []
        threads = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="peer")
        self._stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        try:
            for launch in await asyncio.to_thread(launches, self._settings, self._tell):
                process = await self._stack.enter_async_context(
                    PeerProcess(launch.name, launch.command, launch.environment)
                )
                await process.ready(launch.protocol.health, START_TIMEOUT_S)
                process.pause()
                sender = ToPeer(process.port, launch.protocol, self._settings.asking, threads)
                arms.append(Arm(launch.name, sender, process.turn))
        except BaseException:
            await self._stack.aclose()
            raise
        return arms

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()


def _threads(settings: PeerSettings) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(settings.threads)}


def _llama_cpp(settings: PeerSettings, path: str | None) -> Launch | str:
    binary = shutil.which(path or "llama-server")
    if binary is None:
        return f"there is no {path or 'llama-server on PATH'}"
    threads, slots = str(settings.threads), settings.slots
    words = ["-m", str(settings.gguf), "-t", threads, "-tb", threads, "-np", str(slots), "-c", str(4096 * slots)]
    name = "llama.cpp"
    if settings.draft_gguf is not None:
        name = "llama.cpp+draft"
        words += ["-md", str(settings.draft_gguf), "-td", threads, "--spec-type", "draft-simple"]
        words += ["--spec-draft-n-max", str(settings.num_draft_tokens)]
    return Launch(name, (binary, *words, "--port", "{port}", "--host", "127.0.0.1"), LLAMA_CPP, {})


def _vllm(settings: PeerSettings, path: str | None) -> Launch | str:
    python = path or sys.executable
    if not has_module(python, "vllm"):
        return f"{python} has no package vllm"
    words = ["--model", str(settings.model), "--served-model-name", "peer", "--dtype", settings.dtype]
    words += ["--max-num-seqs", str(settings.slots), "--max-model-len", "4096", "--no-enable-prefix-caching"]
    name = "vllm"
    if settings.draft_model is not None:
        name = "vllm+draft"
        draft = {"model": str(settings.draft_model), "num_speculative_tokens": settings.num_draft_tokens}
        words += ["--speculative-config", json.dumps(draft)]
    command = (python, "-m", "vllm.entrypoints.openai.api_server", *words, "--host", "127.0.0.1", "--port", "{port}")
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{settings.threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # With it, torch's own threads get in the way of vLLM's, at half the speed.
        "OMP_NUM_THREADS": None,
    }
    return Launch(name, command, COMPLETIONS, environment)


def _transformers(settings: PeerSettings, path: str | None) -> Launch | str:
    python = path or sys.executable
    if not has_module(python, "transformers") or not has_module(python, "torch"):
        return f"{python} has no packages transformers and torch"
    words = [str(settings.model), "--dtype", settings.dtype, "--threads", str(settings.threads), "--port", "{port}"]
    name = "transformers"
    if settings.draft_model is not None:
        name = "transformers+draft"
        words += ["--draft", str(settings.draft_model), "--num-draft-tokens", str(settings.num_draft_tokens)]
    return Launch(name, (python, "-P", str(SERVER), *words), COMPLETIONS, _threads(settings))


_MAKERS: dict[str, Callable[[PeerSettings, str | None], Launch | str]] = {
    "llama.cpp": _llama_cpp,
    "vllm": _vllm,
    "transformers": _transformers,
}
