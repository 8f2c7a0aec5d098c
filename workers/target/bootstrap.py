"""How the ranks of a group find each other's channels once torch.distributed connects them."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from dataclasses import dataclass
from typing import Any

import torch

from outrider.core.errors import GroupError
from outrider.workers.engine.engine import Engine
from outrider.workers.engine.parallel import Parallel
from outrider.workers.target.channel import CollectivePlanChannel, PlanChannel, ShmPlanChannel
from outrider.workers.target.liveness import Liveness
from outrider.workers.target.state import Limits

log = logging.getLogger(__name__)

# Without a plan, the leader says after a quarter of this that it is there (collective hand-off only).
PLAN_SILENCE_S = 20.0


@dataclass(frozen=True)
class GroupFacts:
    """What all ranks found out together."""

    limits: Limits
    row_invariant: bool


def node_facts() -> dict[str, Any]:
    """Where this process runs. The address is Ray's for this node, or 127.0.0.1 outside Ray."""
    facts: dict[str, Any] = {
        "node_id": "",
        "ip": "127.0.0.1",
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
    }
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        facts["node_id"] = ray.get_runtime_context().get_node_id()
        facts["ip"] = ray.util.get_node_ip_address()
    return facts


def agree(engine: Engine, parallel: Parallel) -> GroupFacts:
    """Collective. Raises ``GroupError`` where the ranks loaded different models or settings."""
    numbers = [
        engine.vocab_size,
        engine.max_model_len,
        engine.num_blocks,
        engine.block_size,
        engine.max_num_batched_tokens,
        engine.max_num_seqs,
        int(engine.fingerprint[:12] or "0", 16),
    ]
    mine = torch.tensor([*numbers, int(engine.row_invariant)], dtype=torch.int64, device=engine.device)
    gathered = [part.tolist() for part in parallel.gather(mine)]
    for rank, theirs in enumerate(gathered):
        if theirs[:-1] != gathered[0][:-1]:
            raise GroupError(
                f"rank {rank} loaded another model or other settings than rank 0: vocabulary, context, blocks, "
                f"block size, rows and sequences of a step, tokenizer are {theirs[:-1]} against {gathered[0][:-1]}"
            )
    limits = Limits(
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
        num_blocks=engine.num_blocks,
        block_size=engine.block_size,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
    )
    return GroupFacts(limits, all(theirs[-1] for theirs in gathered))


def open_channels(
    parallel: Parallel,
    liveness: Liveness,
    *,
    master_addr: str,
    node_ip: str,
    one_host: bool,
    step_timeout_s: float,
    deadline_s: float,
) -> tuple[PlanChannel, list[dict[str, Any]]]:
    """Collective: the plan channel of this rank, watched by ``liveness``; on the leader also who the ranks are."""
    hello = {key: value for key, value in node_facts().items() if key in ("node_id", "hostname", "pid")}
    if parallel.rank == 0:
        token = secrets.randbits(62)
        port = liveness.listen(node_ip)
        shm = _shared_memory(parallel.world_size, step_timeout_s) if one_host else None
        try:
            parallel.broadcast_ints([token, port, *(shm.path.encode() if shm is not None else b"")], deadline_s)
            ranks = liveness.accept(token, hello, deadline_s)
        finally:
            if shm is not None:
                shm.unlink()  # every rank has opened it, or never will
        return shm or CollectivePlanChannel(parallel, timeout_s=PLAN_SILENCE_S), ranks
    token, port, *encoded = parallel.broadcast_ints(None, deadline_s)
    channel: PlanChannel
    if encoded:
        channel = ShmPlanChannel.open(
            bytes(encoded).decode(), parallel.rank, parallel.world_size, deadline_s=step_timeout_s
        )
    else:
        channel = CollectivePlanChannel(parallel, timeout_s=PLAN_SILENCE_S)
    liveness.connect(master_addr, port, token, hello, deadline_s)
    return channel, []


def _shared_memory(world_size: int, deadline_s: float) -> ShmPlanChannel | None:
    try:
        return ShmPlanChannel.create(world_size, deadline_s=deadline_s)
    except OSError as error:
        log.warning("plans go over sockets, as shared memory has no room: %s", error.strerror)
        return None
