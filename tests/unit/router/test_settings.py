"""From the settings file to the scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.cluster.config import ClusterConfig, parse_config
from outrider.core.errors import ConfigError
from outrider.router.settings import SchedulerSettings, scheduler_settings


def config(**sections: Any) -> ClusterConfig:
    return parse_config(yaml.safe_dump({"target": {"model": "m"}, **sections}), base=Path("/"))


def test_the_defaults_of_both_are_the_same() -> None:
    assert scheduler_settings(config(), 4) == SchedulerSettings()


def test_every_setting_arrives() -> None:
    file = config(
        router={"max_queue": 3, "max_num_seqs": 2, "enable_prefix_caching": False, "max_prefill_slowdown": 3.5},
        speculation={"prompt_lookup_min": 2, "prompt_lookup_max": 4},
    )
    assert scheduler_settings(file, 5) == SchedulerSettings(
        max_queue=3,
        max_num_seqs=2,
        num_speculative_tokens=5,
        lookup_lengths=(2, 4),
        enable_prefix_caching=False,
        max_prefill_slowdown=3.5,
    )


@pytest.mark.parametrize("name", ["prompt_lookup_min", "prompt_lookup_max"])
def test_one_length_stands_for_both(name: str) -> None:
    assert scheduler_settings(config(speculation={name: 3}), 4).lookup_lengths == (3, 3)


@pytest.mark.parametrize(
    "speculation",
    [{"prompt_lookup_min": 0}, {"prompt_lookup_max": 33}, {"prompt_lookup_min": 3, "prompt_lookup_max": 2}],
)
def test_lengths_that_make_no_sense_are_refused(speculation: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="prompt_lookup_m"):
        config(speculation=speculation)
