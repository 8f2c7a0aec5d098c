"""A draft worker as one object: a plain class that the cluster turns into a Ray actor."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from outrider.cluster.config import DraftConfig
from outrider.core.proposal import Proposal
from outrider.core.tracing import Attributes, Tracing
from outrider.v1 import draft_pb2
from outrider.workers.draft.batcher import Batcher
from outrider.workers.draft.compute import ComputeThread, DraftStats
from outrider.workers.draft.server import DraftServer, DraftServicer
from outrider.workers.draft.sessions import DraftSession
from outrider.workers.draft.times import DraftTimes

if TYPE_CHECKING:
    from outrider.cluster.redis_access import RedisAccess

logger = logging.getLogger(__name__)

# Rows that catching up may take in a step beside sessions that draft. On CPUs a step's time grows with its rows from a
# handful on; a GPU takes that many almost for nothing.
CATCH_UP_ROWS_CPU = 32
CATCH_UP_ROWS_CUDA = 256


class DraftWorker:
    """Loads a small model, serves DraftService for it and, with a Redis URL, keeps itself registered.

    ``start`` and ``stop`` are each called once; ``health`` from any thread.
    """

    def __init__(
        self,
        config: DraftConfig,
        *,
        cluster: str,
        draft_id: str,
        redis_url: str | RedisAccess | None,
        tracing: Tracing | None = None,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._draft_id = draft_id
        self._redis_url = redis_url
        self._tracing = tracing
        self._compute: ComputeThread | None = None
        self._times = DraftTimes()
        self._server: DraftServer | None = None
        self._heartbeat: Any = None
        self._stopped = False

    def node(self) -> dict[str, Any]:
        """Where this process runs. ``node_id`` is empty and ``ip`` is the loopback address outside Ray."""
        node_id, ip = _ray_node()
        return {"node_id": node_id, "ip": ip, "hostname": socket.gethostname(), "pid": os.getpid()}

    def start(self) -> dict[str, Any]:
        """Load the model, listen on the node's address and register. Returns the record and the model's facts.

        Raises ``ConfigError`` for a model that cannot be loaded, ``Unavailable`` if address or Redis cannot be used.
        """
        from outrider.grammar import GrammarCompiler
        from outrider.workers.drafters.model import ModelDrafter
        from outrider.workers.engine.engine import Engine
        from outrider.workers.engine.parallel import Parallel
        from outrider.workers.engine.passing_thread import in_passing_thread
        from outrider.workers.matchers import MatcherMaker

        config = self._config
        engine = in_passing_thread(lambda: Engine(config, Parallel.single()))
        drafter = ModelDrafter(engine, top_m=config.top_m)
        catch_up_rows = CATCH_UP_ROWS_CUDA if engine.device.type == "cuda" else CATCH_UP_ROWS_CPU
        batcher = Batcher(
            drafter,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_tokens=config.max_num_tokens,
            catch_up_rows=catch_up_rows,
            on_traced_proposal=self._trace if self._tracing is not None else None,
            matcher_maker=MatcherMaker(GrammarCompiler(config.model, drafter.vocab_size, engine.end_token_ids)),
        )
        hello = draft_pb2.DraftHello(
            draft_id=self._draft_id,
            model=config.model,
            drafter=drafter.name,
            tokenizer_fingerprint=drafter.fingerprint,
            vocab_size=drafter.vocab_size,
            max_model_len=batcher.capacity,
            max_num_tokens=config.max_num_tokens,
        )
        servicer = DraftServicer(hello)
        server = DraftServer(servicer)
        self._times = batcher.times
        compute = ComputeThread(batcher, deliver=server.deliver, on_failure=server.fail)
        servicer.compute = compute
        node = self.node()
        self._server, self._compute = server, compute
        compute.start()
        record = {
            "draft_id": self._draft_id,
            "address": server.start(node["ip"]),
            "model": config.model,
            "placement": config.placement,
            "node": node["hostname"],
            "pid": node["pid"],
        }
        if self._redis_url is not None:
            from outrider.cluster.registry import Heartbeat

            heartbeat = Heartbeat(self._redis_url, self._cluster, "draft", self._draft_id, record)
            heartbeat.start()
            self._heartbeat = heartbeat
        logger.info("draft %s serves %s on %s", self._draft_id, config.model, record["address"])
        return {
            **record,
            "tokenizer_fingerprint": drafter.fingerprint,
            "vocab_size": drafter.vocab_size,
            "max_model_len": batcher.capacity,
            "row_invariant": engine.row_invariant,
            "num_blocks": drafter.num_blocks,
        }

    def health(self) -> dict[str, Any]:
        """``state`` (starting, ready, failed with ``error``, stopped) and the facts of ``DraftStats``."""
        compute = self._compute
        stats = DraftStats() if compute is None else compute.stats
        facts: dict[str, Any] = {"state": "ready", **asdict(stats)}
        if self._stopped:
            facts["state"] = "stopped"
        elif compute is None:
            facts["state"] = "starting"
        elif compute.failure is not None:
            facts.update(state="failed", error=compute.failure)
        return facts

    def metrics(self) -> str:
        """In Prometheus' text format; never waits for a step."""
        from outrider.metrics.declared import registry, text
        from outrider.workers.draft.metrics import draft_families

        compute = self._compute
        stats = DraftStats() if compute is None else compute.stats
        families = draft_families(stats, self._times, failed=compute is not None and compute.failure is not None)
        return text(registry("draft", lambda: families))

    def stop(self) -> None:
        """Leave the registry, tell the schedulers (Evicted with SHUTDOWN), end the streams and the threads."""
        self._stopped = True
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._compute is not None:
            self._compute.stop()
        if self._server is not None:
            self._server.stop()
        if self._tracing is not None:
            self._tracing.close()

    def _trace(self, session: DraftSession, proposal: Proposal) -> None:
        """The span of a proposal that was made just now."""
        if self._tracing is None:
            return
        end_ns = time.time_ns()
        attributes: Attributes = {
            "outrider.draft_id": self._draft_id,
            "outrider.drafter": proposal.drafter,
            "outrider.epoch": session.address.epoch,
            "outrider.base_len": proposal.base_len,
            "outrider.num_draft_tokens": len(proposal.tokens),
        }
        start_ns = end_ns - round(1e6 * proposal.draft_ms)
        self._tracing.record("propose", session.traceparent, start_ns, end_ns, attributes)


def _ray_node() -> tuple[str, str]:
    """Id and address of the Ray node that this process is an actor on, or ("", "127.0.0.1")."""
    ray = sys.modules.get("ray")  # inside an actor it has been imported
    if ray is None or not ray.is_initialized():
        return "", "127.0.0.1"
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
