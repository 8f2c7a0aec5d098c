"""Placement is plain data in, plain data out."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cluster.config import ClusterConfig
from outrider.cluster.placement import (
    NodeFacts,
    draft_node,
    local_size,
    plan_placement,
    rank_device,
    shortage,
    threads_per_actor,
)


def settings(*drafts: dict[str, Any], **target: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {"target": {"model": "/m", **target}, "drafts": [{"model": "/d", **draft} for draft in drafts]}
    )


def node(node_id: str, cpus: float = 4.0, free: float | None = None, **extra: float) -> NodeFacts:
    available = {"CPU": cpus if free is None else free, **extra}
    return NodeFacts(node_id, f"addr-{node_id}", int(cpus), {"CPU": cpus, **extra}, available)


def test_a_bundle_for_each_rank_with_its_resources_and_the_strategy() -> None:
    placement = plan_placement(
        settings(tensor_parallel_size=3, placement_strategy="STRICT_SPREAD", resources={"target": 1})
    )
    assert placement.strategy == "STRICT_SPREAD"
    assert placement.bundles == ({"CPU": 1.0, "target": 1.0},) * 3
    assert placement.drafts == ()


def test_a_same_node_draft_has_its_share_in_the_bundle_of_rank_0() -> None:
    config = settings({"placement": "sameNode", "replicas": 2, "resources": {"x": 0.5}}, tensor_parallel_size=2)
    placement = plan_placement(config)
    assert placement.bundles == ({"CPU": 3.0, "x": 1.0}, {"CPU": 1.0})
    assert placement.rank_needs == {"CPU": 1.0}
    assert [seat.name for seat in placement.drafts] == ["draft-0", "draft-1"]
    assert placement.num_actors == 4


def test_any_and_remote_drafts_leave_the_bundles_alone() -> None:
    config = settings({"name": "a", "placement": "any"}, {"name": "b", "placement": "remote"}, tensor_parallel_size=2)
    placement = plan_placement(config)
    assert placement.bundles == ({"CPU": 1.0}, {"CPU": 1.0})
    assert [seat.name for seat in placement.drafts] == ["a-0", "b-0"]


@pytest.mark.parametrize(
    ("num_gpus", "target_gpu", "draft_gpu"),
    [(0.0, False, False), (1.0, False, True), (2.0, True, False), (3.0, True, True)],
)
def test_auto_gives_gpus_to_all_ranks_first_and_then_to_all_drafts(
    num_gpus: float, target_gpu: bool, draft_gpu: bool
) -> None:
    placement = plan_placement(settings({}, tensor_parallel_size=2), num_gpus=num_gpus)
    assert ("GPU" in placement.rank_needs) is target_gpu
    assert ("GPU" in placement.drafts[0].needs) is draft_gpu


def test_devices_that_are_named_are_honoured() -> None:
    placement = plan_placement(settings({"device": "cpu"}, device="cuda"), num_gpus=8)
    assert placement.rank_needs["GPU"] == 1.0
    assert "GPU" not in placement.drafts[0].needs
    assert plan_placement(settings(device="cuda"), num_gpus=0).rank_needs["GPU"] == 1.0


def test_a_remote_draft_avoids_the_nodes_of_ranks() -> None:
    nodes = [node("a"), node("b", cpus=8), node("c", cpus=16, free=2), node("d", cpus=32)]
    assert draft_node("remote", {"CPU": 1}, nodes, ["d", "a"]) == "b"
    assert draft_node("remote", {"CPU": 4}, nodes, ["d", "b"]) == "a"


def test_a_remote_draft_prefers_room_now_to_a_larger_node() -> None:
    nodes = [node("a"), node("b", cpus=2), node("c", cpus=64, free=0)]
    assert draft_node("remote", {"CPU": 1}, nodes, ["a"]) == "b"
    assert draft_node("remote", {"CPU": 16}, nodes, ["a"]) == "c"


def test_a_remote_draft_without_another_node_runs_beside_the_ranks() -> None:
    assert draft_node("remote", {"CPU": 1}, [node("a")], ["a", "a"]) is None
    assert draft_node("remote", {"CPU": 1, "fast": 1}, [node("a", fast=1), node("b")], ["a"]) is None


def test_any_is_free_and_same_node_follows_rank_0() -> None:
    nodes = [node("a"), node("b")]
    assert draft_node("any", {"CPU": 1}, nodes, ["a"]) is None
    assert draft_node("sameNode", {"CPU": 1}, nodes, ["b", "a"]) == "b"


def test_equal_nodes_are_chosen_in_one_order() -> None:
    nodes = [node("c"), node("b"), node("a")]
    assert draft_node("remote", {"CPU": 1}, nodes, ["a"]) == "b"


def test_memory_is_shared_only_where_all_ranks_are_on_one_node() -> None:
    assert local_size(["a", "a", "a"]) == 3
    assert local_size(["a", "a", "b"]) == 1
    assert local_size(["a"]) == 1


def test_threads_share_the_cores_of_one_machine_among_all_actors() -> None:
    drafts = plan_placement(settings({"placement": "remote"})).drafts
    assert threads_per_actor("a", [node("a", cpus=2)], ["a", "a"], drafts) == 1
    assert threads_per_actor("a", [node("a", cpus=16)], ["a", "a"], drafts) == 5
    assert threads_per_actor(None, [node("a", cpus=16)], ["a", "a"], drafts) == 5
    assert threads_per_actor("a", [node("a", cpus=16)], ["a"], ()) == 16


def test_threads_follow_the_node() -> None:
    placement = plan_placement(settings({"name": "s", "placement": "sameNode"}, {"name": "r", "placement": "remote"}))
    nodes = [node("a", cpus=12), node("b", cpus=8), node("c", cpus=6)]
    assert threads_per_actor("a", nodes, ["a", "b"], placement.drafts) == 6
    assert threads_per_actor("b", nodes, ["a", "b"], placement.drafts) == 8
    assert threads_per_actor("c", nodes, ["a", "b"], placement.drafts) == 6
    assert threads_per_actor(None, nodes, ["a", "b"], placement.drafts) == 6


def test_a_shortage_is_named() -> None:
    nodes = [node("a", cpus=2), node("b", cpus=2, gpu=1)]
    assert shortage([{"CPU": 1}] * 4, nodes) is None
    assert shortage([{"CPU": 1}] * 5, nodes) == "5 CPU wanted, 4 in the Ray cluster"
    assert shortage([{"CPU": 1, "target": 1}], nodes) == "1 target wanted, 0 in the Ray cluster"
    assert shortage([{"CPU": 3}], nodes) == "no node offers 3 CPU together"


@pytest.mark.parametrize(
    ("size", "device", "num_gpus", "told"),
    [
        (2, "auto", 1.0, "cpu"),
        (2, "auto", 2.0, "auto"),
        (2, "cuda", 0.0, "cuda"),
        (1, "auto", 0.0, "auto"),
    ],
)
def test_ranks_never_share_a_gpu(size: int, device: str, num_gpus: float, told: str) -> None:
    """Without GPUs of their own, ranks on ``auto`` would all choose the first one of their host."""
    config = settings(tensor_parallel_size=size, device=device)
    placement = plan_placement(config, num_gpus=num_gpus)
    assert rank_device(config.target, placement.rank_needs) == told
