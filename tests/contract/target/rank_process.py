"""One rank in a process of its own, driven by the test over a pipe: ``python rank_process.py ADDRESS SETTINGS``.

Settings may plant a fault, which the shard itself knows nothing about. Beside the shard's own methods the test may
call ``hold_grammars`` and ``release_grammars``: between them no grammar gets compiled.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Client
from typing import Any

from outrider.cluster.config import TargetConfig
from outrider.core.grammar import Grammar
from outrider.core.plan import StepPlan
from outrider.grammar import GrammarCompiler, Matcher
from outrider.workers.target.shard import TargetShard
from outrider.workers.target.state import Admitted, Refused, SequenceTable
from outrider.workers.target.step import Admission, Computed, Exchanged, RankStep


class ForgetfulTable(SequenceTable):
    """Loses a computed position of every sequence after the third plan."""

    plans = 0

    def apply(self, plan: StepPlan) -> tuple[list[Admitted], list[Refused]]:
        self.plans += 1
        if self.plans == 4:
            for state in self.sequences.values():
                state.kv_len -= 1
                state.held -= 1
        return super().apply(plan)


class SlowTable(SequenceTable):
    """Stops for a long while at the third plan."""

    plans = 0

    def apply(self, plan: StepPlan) -> tuple[list[Admitted], list[Refused]]:
        self.plans += 1
        if self.plans == 3:
            time.sleep(600)
        return super().apply(plan)


class BrokenTable(SequenceTable):
    """Raises what nobody expects at the third plan."""

    plans = 0

    def apply(self, plan: StepPlan) -> tuple[list[Admitted], list[Refused]]:
        self.plans += 1
        if self.plans == 3:
            raise MemoryError("no memory left")
        return super().apply(plan)


class LyingStep(RankStep):
    """Runs the right rows, but reports another checksum after the third plan."""

    steps = 0

    def exchange(self, admission: Admission, computed: Computed) -> Exchanged:
        self.steps += 1
        if self.steps > 3:
            digest = replace(admission.digest, checksum=admission.digest.checksum ^ 1)
            admission = replace(admission, digest=digest)
        return super().exchange(admission, computed)


class GrammarGate:
    """Lets compilers wait: how long compiling takes is the test's to say, not the machine's."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._compile = GrammarCompiler.matcher
        self.calls = {"hold_grammars": self._open.clear, "release_grammars": self._open.set}

    def install(self) -> None:
        def matcher(compiler: GrammarCompiler, grammar: Grammar) -> Matcher:
            if not self._open.wait(timeout=240):
                raise TimeoutError("nobody released the grammars")
            return self._compile(compiler, grammar)

        GrammarCompiler.matcher = matcher  # type: ignore[method-assign]


TABLES = {"forgetful": ForgetfulTable, "slow": SlowTable, "broken": BrokenTable}


def main() -> None:
    address, settings = sys.argv[1], json.loads(sys.argv[2])
    fault = settings.pop("fault", None)
    config = TargetConfig(**settings.pop("config"))
    shard = TargetShard(config, cluster="test", redis_url=settings.pop("redis_url", None), **settings)
    if fault in TABLES:
        shard.table_class = TABLES[fault]  # type: ignore[misc]
    elif fault == "lying":
        shard.step_class = LyingStep  # type: ignore[misc]
    elif fault is not None:
        raise ValueError(f"no fault is called {fault!r}")
    gate = GrammarGate()
    gate.install()
    with Client(address, authkey=os.environ["RANK_KEY"].encode()) as connection:
        while True:
            try:
                method, args = connection.recv()
            except EOFError:
                faulthandler.dump_traceback_later(30)  # the log says what a process that does not end is doing
                return
            try:
                value = (gate.calls.get(method) or getattr(shard, method))(*args)
                if method == "read_kv":  # tensors would travel through shared memory
                    value = [array.numpy() for layer in value for array in layer]
                answer: tuple[str, Any] = ("ok", value)
            except Exception as error:  # noqa: BLE001 - the test sees it
                answer = ("error", f"{type(error).__name__}: {error}")
            connection.send(answer)


if __name__ == "__main__":
    main()
