"""Grammars are compiled beside the threads that serve: a heavy one must not hold up the requests of others."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

from outrider.core.grammar import Grammar
from outrider.grammar import GrammarCompiler, Matcher

log = logging.getLogger(__name__)

# Grammars that are compiled at once; others wait for them.
MAX_THREADS = 2


class MatcherMaker:
    """Makes matchers in threads of its own. Any thread may call it."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._slots = threading.BoundedSemaphore(MAX_THREADS)

    def start(self, grammar: Grammar) -> Future[Matcher]:
        """A matcher at the start of the output; done at once where the grammar was used lately.

        The future fails with ``InvalidRequest`` where the grammar does not compile.
        """
        future: Future[Matcher] = Future()
        future.set_running_or_notify_cancel()
        if self._compiler.has(grammar):
            self._make(grammar, future)
        else:
            # A daemon: what it runs cannot be stopped, and must not keep the process from ending.
            threading.Thread(target=self._wait_and_make, args=(grammar, future), name="grammar", daemon=True).start()
        return future

    def _wait_and_make(self, grammar: Grammar, future: Future[Matcher]) -> None:
        with self._slots:
            self._make(grammar, future)

    def _make(self, grammar: Grammar, future: Future[Matcher]) -> None:
        try:
            future.set_result(self._compiler.matcher(grammar))
        except Exception as error:  # whatever it was, whoever waits must hear of it
            log.debug("a grammar does not compile", exc_info=error)
            future.set_exception(error)
