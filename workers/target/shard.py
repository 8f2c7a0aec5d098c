"""One rank of a target group: a plain class that becomes a Ray actor, or runs in any process.

Life: ``node`` (and on rank 0 ``reserve``), then ``start`` on all ranks at once, then ``health`` now and then, at last
``stop``. A group that failed stays failed: end its processes and start new ones under a new epoch. A failed rank may
be stuck in a collective with a dead partner; its calls go on answering, but only the end of its process frees it.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.cluster.config import TargetConfig
from outrider.core.errors import GroupError
from outrider.core.plan import GroupInfo
from outrider.core.tracing import Tracing
from outrider.grammar import GrammarCompiler
from outrider.workers.engine.engine import Engine
from outrider.workers.engine.parallel import Parallel, free_port
from outrider.workers.engine.passing_thread import in_passing_thread
from outrider.workers.matchers import MatcherMaker
from outrider.workers.target.bootstrap import GroupFacts, agree, node_facts, open_channels
from outrider.workers.target.channel import PlanChannel
from outrider.workers.target.follower import Follower
from outrider.workers.target.leader import Leader
from outrider.workers.target.liveness import Liveness
from outrider.workers.target.server import TargetServer
from outrider.workers.target.state import SequenceTable
from outrider.workers.target.step import RankStep
from outrider.workers.target.times import StepTimes

if TYPE_CHECKING:
    from outrider.cluster.redis_access import RedisAccess

log = logging.getLogger(__name__)

# Time for all ranks to load the model and find each other.
START_DEADLINE_S = 600.0


class TargetShard:
    """Rank ``rank`` of the group ``group_id``. Cheap to make; ``start`` does the work."""

    # What tests replace to plant faults.
    table_class = SequenceTable
    step_class = RankStep

    def __init__(
        self,
        config: TargetConfig,
        *,
        cluster: str,
        group_id: str,
        rank: int,
        epoch: int,
        redis_url: str | RedisAccess | None,
        tracing: Tracing | None = None,
    ) -> None:
        """``redis_url`` None: the leader does not register."""
        self._config = config
        self._cluster = cluster
        self._group_id = group_id
        self._rank = rank
        self._epoch = epoch
        self._redis_url = redis_url
        self._tracing = tracing
        self._engine: Engine | None = None
        self._parallel: Parallel | None = None
        self._step: RankStep | None = None
        self._channel: PlanChannel | None = None
        self._liveness: Liveness | None = None
        self._leader: Leader | None = None
        self._follower: Follower | None = None
        self._server: TargetServer | None = None
        self._heartbeat: Any = None
        self._stopped = False

    def node(self) -> dict[str, Any]:
        """``node_id`` (Ray's; empty outside Ray), ``ip``, ``hostname``, ``pid``."""
        return node_facts()

    def reserve(self) -> tuple[str, int]:
        """Rank 0: address and a free port for ``start`` of all ranks."""
        ip: str = node_facts()["ip"]
        return ip, free_port(ip)

    def start(self, master_addr: str, master_port: int, local_size: int) -> dict[str, Any]:
        """Load the model, form the group and, on rank 0, serve it. Blocks until all ranks are ready.

        Args:
            master_addr, master_port: what ``reserve`` of rank 0 returned.
            local_size: ranks of the group on this host.

        Returns:
            Facts about the rank; on rank 0 with the ``address`` that serves ``TargetService``.

        Raises:
            ConfigError: a setting is wrong.
            GroupError: the ranks did not come together.
        """
        config, world_size = self._config, self._config.tensor_parallel_size
        node = node_facts()
        parallel = Parallel.single()
        if world_size > 1:
            parallel = Parallel.connect(
                rank=self._rank,
                world_size=world_size,
                local_size=local_size,
                master_addr=master_addr,
                master_port=master_port,
                node_ip=node["ip"],
                device=_device(config),
                timeout_s=max(config.step_timeout_s, 300.0),
            )
        self._parallel = parallel
        self._engine = engine = in_passing_thread(lambda: Engine(config, parallel))
        facts = agree(engine, parallel)
        self._step = self.step_class(engine, parallel, self.table_class(facts.limits))
        ranks = [{"rank": 0, **{key: node[key] for key in ("node_id", "hostname", "pid")}}]
        if world_size > 1:
            self._liveness = Liveness(self._rank, world_size, self._lost, self._left)
            self._channel, ranks = open_channels(
                parallel,
                self._liveness,
                master_addr=master_addr,
                node_ip=node["ip"],
                one_host=local_size == world_size,
                step_timeout_s=config.step_timeout_s,
                deadline_s=START_DEADLINE_S,
            )
        started = {"rank": self._rank, "epoch": self._epoch, **node}
        if self._rank == 0:
            started |= self._lead(facts, ranks, node["ip"])
        elif self._channel is not None and self._liveness is not None:
            self._follower = Follower(self._step, self._channel, self._rank, self._liveness.fail, self._tracing)
            self._follower.start()
            self._liveness.start()
        return started

    def health(self) -> dict[str, Any]:
        """``state``: "starting", "ready", "failed" (with ``message``) or "stopped"; ``steps`` executed so far."""
        worker = self._leader or self._follower
        facts = {"rank": self._rank, "epoch": self._epoch, "steps": worker.steps if worker else 0}
        if self._stopped or (self._follower is not None and self._follower.stopped):
            return {**facts, "state": "stopped"}
        if worker is None:
            return {**facts, "state": "starting"}
        if worker.failure is not None:
            return {**facts, "state": "failed", "message": worker.failure}
        return {**facts, "state": "ready", "sequences": len(self._step.table) if self._step else 0}

    def metrics(self) -> str:
        """In Prometheus' text format; never waits for a step."""
        from outrider.metrics.declared import registry, text
        from outrider.workers.target.metrics import rank_families

        worker = self._leader or self._follower
        families = rank_families(
            epoch=self._epoch,
            failed=worker is not None and worker.failure is not None,
            steps=worker.steps if worker is not None else 0,
            sequences=len(self._step.table) if self._step is not None else 0,
            kv_cache_bytes=self._engine.kv_cache_bytes if self._engine is not None else 0,
            times=worker.times if worker is not None else StepTimes(),
        )
        return text(registry("target", lambda: families))

    def stop(self) -> None:
        """Leave the registry, end the stream, the threads and the group. Safe to call twice; never blocks for long."""
        self._stopped = True
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        if self._server is not None:
            self._server.stop()
        worker = self._leader or self._follower
        ended = worker.stop() if worker is not None else True
        if self._liveness is not None:
            self._liveness.close()
        if self._channel is not None:
            self._channel.close()
        if not ended:
            log.warning("rank %d is stuck in a collective; its process has to be ended", self._rank)
        elif self._parallel is not None:
            self._parallel.close()
        if self._tracing is not None:
            self._tracing.close()

    def read_kv(self, seq_id: int, length: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """This rank's keys and values of a sequence, per layer, each [length, local_kv_heads, head_dim].

        For tests, while no step runs. ``length`` None: the positions that the last plan declared committed.
        """
        if self._step is None or self._engine is None:
            raise GroupError("the shard was not started")
        state = self._step.table.sequences[seq_id]
        return self._engine.read_kv(state.block_table, state.kv_len if length is None else length)

    def _lead(self, facts: GroupFacts, ranks: list[dict[str, Any]], ip: str) -> dict[str, Any]:
        if self._step is None or self._engine is None:
            raise GroupError("the shard was not started")
        config, limits = self._config, facts.limits
        info = GroupInfo(
            group_id=self._group_id,
            model=config.model,
            tokenizer_fingerprint=self._engine.fingerprint,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            tensor_parallel_size=config.tensor_parallel_size,
            row_invariant=facts.row_invariant,
            dtype=str(self._engine.dtype).removeprefix("torch."),
            max_num_seqs=limits.max_num_seqs,
        )
        compiler = GrammarCompiler(config.model, limits.vocab_size, self._engine.end_token_ids)
        self._leader = leader = Leader(self._step, self._channel, MatcherMaker(compiler), self._tracing)
        if self._liveness is not None:
            leader.on_failure(self._liveness.fail)
        leader.start()
        if self._liveness is not None:
            self._liveness.start()  # before anything that may take long: the others watch already
        self._server = TargetServer(leader, info, self._epoch, config.step_timeout_s)
        address = self._server.start(ip)
        record = {
            "group_id": self._group_id,
            "epoch": self._epoch,
            "address": address,
            "tensor_parallel_size": config.tensor_parallel_size,
            "ranks": [{"rank": rank["rank"], "node": rank["hostname"], "pid": rank["pid"]} for rank in ranks],
            "model": config.model,
            "dtype": info.dtype,
        }
        if self._redis_url is not None:
            from outrider.cluster.registry import Heartbeat

            self._heartbeat = Heartbeat(self._redis_url, self._cluster, "target", self._group_id, record)
            self._heartbeat.start()
            leader.on_failure(lambda _: self._withdraw())
        log.info("group %s serves at %s", self._group_id, address)
        return record | {"vocab_size": info.vocab_size, "tokenizer_fingerprint": info.tokenizer_fingerprint}

    def _withdraw(self) -> None:
        """A failed group is no member any more. In a thread of its own: stopping a heartbeat may wait for Redis."""
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            threading.Thread(target=heartbeat.stop, name="target-withdraw", daemon=True).start()

    def _lost(self, message: str) -> None:
        worker = self._leader or self._follower
        if worker is not None and not self._stopped:
            worker.fail(message)

    def _left(self) -> None:
        if self._follower is not None:
            self._follower.leave()


def _device(config: TargetConfig) -> str:
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device
