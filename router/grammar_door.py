"""Grammars at the door: they are compiled once to refuse bad ones, beside the event loop, for that may take seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from outrider.core.grammar import Grammar
from outrider.grammar import GrammarCompiler
from outrider.router.tokenizer import TextTokenizer

Result = TypeVar("Result")

MAX_AT_ONCE = 4  # grammars that are checked; further ones wait, and nothing else waits for them


class GrammarDoor:
    """Checks grammars for one model. ``close`` it in the end."""

    def __init__(self, model_dir: str | Path, tokenizer: TextTokenizer) -> None:
        self._compiler = GrammarCompiler(model_dir, tokenizer.vocab_size, tokenizer.eos_token_ids)
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="grammar")

    def check(self, grammar: Grammar) -> None:
        """Raises ``InvalidRequest`` or ``Unavailable``; may take seconds (``run``)."""
        self._compiler.check(grammar)

    async def run(self, function: Callable[[], Result]) -> Result:
        """Call a function that checks grammars, in a thread that is there for nothing else."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._compiler.close()
