"""Where ranks and drafts run: from settings to Ray bundles, strategies and nodes. Plain data; Ray is not imported.

Ranks get one placement group, a bundle each, laid out by ``target.placement_strategy``. A ``sameNode`` draft sits in
the bundle of rank 0, which is made larger for it, so that both are placed at once. A ``remote`` draft goes to a node
without ranks; where the cluster has no such node (one machine) it runs beside them. An ``any`` draft goes where Ray
puts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from outrider.cluster.config import ClusterConfig, DraftConfig, EngineConfig, TargetConfig

Resources = dict[str, float]


@dataclass(frozen=True)
class NodeFacts:
    """A living Ray node. ``cores`` are those that threads may use."""

    node_id: str
    address: str
    cores: int
    total: Mapping[str, float]
    available: Mapping[str, float]


@dataclass(frozen=True)
class DraftSeat:
    """One draft worker to start."""

    pool: DraftConfig
    index: int
    needs: Resources = field(hash=False)

    @property
    def name(self) -> str:
        return f"{self.pool.name}-{self.index}"


@dataclass(frozen=True)
class ClusterPlacement:
    """What to ask of Ray.

    Attributes:
        bundles: one for each rank, in rank order, to be placed by ``strategy``.
        rank_needs: what each rank takes out of its bundle.
        drafts: the draft workers; those with placement ``sameNode`` have their share in ``bundles[0]``.
    """

    bundles: tuple[Resources, ...]
    strategy: str
    rank_needs: Resources
    drafts: tuple[DraftSeat, ...]

    @property
    def num_actors(self) -> int:
        return len(self.bundles) + len(self.drafts)


def plan_placement(config: ClusterConfig, *, num_gpus: float = 0.0) -> ClusterPlacement:
    """What a cluster needs.

    ``num_gpus`` is the number of GPUs that Ray has; with ``device: auto`` the ranks take them if there are enough for
    all ranks, and then the drafts if enough are left for all drafts.
    """
    size = config.target.tensor_parallel_size
    seats = [(pool, index) for pool in config.drafts for index in range(pool.replicas)]
    rank_needs = _needs(config.target, config.target.resources, num_gpus >= size)
    left = num_gpus - size * rank_needs.get("GPU", 0.0)
    enough = left >= sum(pool.device != "cpu" for pool, _ in seats)
    drafts = tuple(DraftSeat(pool, index, _needs(pool, pool.resources, enough)) for pool, index in seats)
    first = rank_needs
    for seat in drafts:
        if seat.pool.placement == "sameNode":
            first = _add(first, seat.needs)
    bundles = (first, *(dict(rank_needs) for _ in range(size - 1)))
    return ClusterPlacement(bundles, config.target.placement_strategy, rank_needs, drafts)


def _needs(engine: EngineConfig, resources: Mapping[str, float], auto_gpu: bool) -> Resources:
    needs: Resources = {"CPU": 1.0, **resources}
    if engine.device == "cuda" or (engine.device == "auto" and auto_gpu):
        needs["GPU"] = 1.0
    return needs


def rank_device(target: TargetConfig, rank_needs: Mapping[str, float]) -> Literal["auto", "cpu", "cuda"]:
    """The device that ranks are told. ``auto`` is the CPU where several ranks have no GPUs of their own: those of one
    host would all choose its first GPU, which NCCL refuses."""
    if target.device == "auto" and target.tensor_parallel_size > 1 and "GPU" not in rank_needs:
        return "cpu"
    return target.device


def _add(left: Mapping[str, float], right: Mapping[str, float]) -> Resources:
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in {**left, **right}}


def draft_node(
    placement: Literal["any", "sameNode", "remote"],
    needs: Mapping[str, float],
    nodes: Sequence[NodeFacts],
    rank_nodes: Sequence[str],
) -> str | None:
    """The node that a draft is bound to; None: wherever Ray finds room.

    ``sameNode``: the node of rank 0. ``remote``: of the nodes without ranks that could ever hold the draft, the one
    with the most free CPUs (the first in order of ``node_id`` among equals); None if there is none.
    """
    if placement == "any":
        return None
    if placement == "sameNode":
        return rank_nodes[0]
    away = [node for node in nodes if node.node_id not in rank_nodes and _fits(needs, node.total)]
    # A node that has room now comes before one that would have to wait.
    away.sort(key=lambda n: (not _fits(needs, n.available), -n.available.get("CPU", 0.0), n.node_id))
    return away[0].node_id if away else None


def _fits(needs: Mapping[str, float], offered: Mapping[str, float]) -> bool:
    return all(offered.get(name, 0.0) >= amount for name, amount in needs.items())


def local_size(rank_nodes: Sequence[str]) -> int:
    """Ranks that may share memory: all of them if they are on one node, else each by itself."""
    return len(rank_nodes) if len(set(rank_nodes)) == 1 else 1


def threads_per_actor(
    node_id: str | None, nodes: Sequence[NodeFacts], rank_nodes: Sequence[str], drafts: Sequence[DraftSeat]
) -> int:
    """Threads for each actor on a node: an equal share of its cores, at least one.

    ``node_id`` None is whichever node Ray gives to a draft. Drafts that are not bound to rank 0 are taken to spread
    over the nodes without ranks, or over all where there are none.
    """
    bound = sum(seat.pool.placement == "sameNode" for seat in drafts)
    away = [node.node_id for node in nodes if node.node_id not in rank_nodes] or [node.node_id for node in nodes]
    if node_id is None:
        node_id = away[0]
    num_actors = list(rank_nodes).count(node_id)
    if node_id == rank_nodes[0]:
        num_actors += bound
    if node_id in away:
        num_actors += -(-(len(drafts) - bound) // len(away))
    cores = next((node.cores for node in nodes if node.node_id == node_id), 1)
    return max(1, cores // max(1, num_actors))


def shortage(bundles: Sequence[Mapping[str, float]], nodes: Sequence[NodeFacts]) -> str | None:
    """Why the bundles can never be placed, in words; None if the totals suffice."""
    for name in sorted({name for bundle in bundles for name in bundle}):
        wanted = sum(bundle.get(name, 0.0) for bundle in bundles)
        offered = sum(node.total.get(name, 0.0) for node in nodes)
        if wanted > offered:
            return f"{wanted:g} {name} wanted, {offered:g} in the Ray cluster"
    for bundle in bundles:
        if not any(_fits(bundle, node.total) for node in nodes):
            needs = ", ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()))
            return f"no node offers {needs} together"
    return None
