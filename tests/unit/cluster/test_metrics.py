"""What a supervisor puts together of its own metrics and those of ranks and drafts."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.cluster.metrics import SUPERVISOR, Parts, SupervisorMetrics
from outrider.core.errors import GroupError
from outrider.metrics.declared import Declared, family, registry, text
from outrider.workers.target.metrics import RANK, rank_families
from outrider.workers.target.times import StepTimes
from outrider_promtool import promtool_check


class Telling:
    """A rank that answers at once."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    async def call(self, method: str, *, timeout_s: float) -> str:
        assert (method, timeout_s) == ("metrics", 4.0)
        families = rank_families(
            epoch=3, failed=False, steps=self.steps, sequences=0, kv_cache_bytes=64, times=StepTimes()
        )
        return text(registry("target", lambda: families))


class Silent:
    """One that is stuck, as ``Actor.call`` tells it."""

    async def call(self, method: str, *, timeout_s: float) -> str:
        raise GroupError("target rank 1 did not answer 'metrics' within 4 s")


def samples(told: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for one in text_string_to_metric_families(told)
        for sample in one.samples
    }


async def test_each_rank_has_its_label_and_one_that_is_stuck_is_missing() -> None:
    parts = Parts(
        ready=True,
        epoch=3,
        rebuilds=2,
        draft_restarts={"draft-0": 1},
        ranks={"0": Telling(7), "1": Silent(), "2": Telling(9)},
        drafts={"draft-0": None},
    )
    told = await SupervisorMetrics(lambda: parts).tell()
    found = samples(told)

    def value(name: str, **labels: str) -> float | None:
        return found.get((name, frozenset(labels.items())))

    steps = [value("outrider_target_steps_total", rank=rank) for rank in "012"]
    assert steps == [7, None, 9]
    assert [value("outrider_rank_up", rank=rank) for rank in "012"] == [1, 0, 1]
    assert value("outrider_draft_up", draft="draft-0") == 0
    assert value("outrider_supervisor_target_rebuilds_total") == 2
    assert value("outrider_supervisor_draft_restarts_total", draft="draft-0") == 1
    assert value("process_resident_memory_bytes") is not None  # its own
    assert value("process_resident_memory_bytes", rank="0") is not None
    types = [line.split()[2] for line in told.splitlines() if line.startswith("# TYPE ")]
    assert set(types) == {metric.name for metric in (*SUPERVISOR, *RANK)}
    assert len(types) == len(set(types))  # one family for each name, whoever tells of it
    promtool_check(told)


async def test_there_is_something_to_tell_before_anything_was_started() -> None:
    told = await SupervisorMetrics(Parts).tell()
    assert samples(told)["outrider_supervisor_ready", frozenset()] == 0
    promtool_check(told)


@pytest.mark.parametrize("kind", ["counter", "gauge"])
def test_a_value_of_another_kind_is_refused(kind: str) -> None:
    declared = Declared("outrider_x_total", kind, "Help.")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="outrider_x_total"):
        family(declared, StepTimes().phases["plan"])


def test_promtool_does_find_faults() -> None:
    with pytest.raises(AssertionError, match="should not have"):
        promtool_check("# HELP outrider_x_total A gauge.\n# TYPE outrider_x_total gauge\noutrider_x_total 1\n")
