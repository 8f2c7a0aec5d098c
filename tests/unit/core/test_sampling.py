"""Sampling settings that came over the network are checked before they are used."""

from __future__ import annotations

import pytest

from outrider.core.sampling import Sampling, Verifier, sampling_fault


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(temperature=float("nan")), "temperature"),
        (Sampling(temperature=float("inf")), "temperature"),
        (Sampling(temperature=-0.5), "temperature"),
        (Sampling(temperature=1e-310), "temperature"),
        (Sampling(top_p=0.0), "top_p"),
        (Sampling(top_p=1.5), "top_p"),
        (Sampling(top_p=float("nan")), "top_p"),
        (Sampling(temperature=0.0, verifier=Verifier.COUPLED), "verifier"),
        (Sampling(temperature=1.0, verifier=Verifier.GREEDY), "verifier"),
    ],
)
def test_sampling_faults_name_the_field(sampling: Sampling, field: str) -> None:
    assert f"sampling.{field}" in str(sampling_fault(sampling))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(0.5, 3, 0.25, 2**64 - 1, 2, Verifier.REJECTION),
        Sampling(temperature=0.0, verifier=Verifier.GREEDY),
    ],
)
def test_good_sampling_has_no_fault(sampling: Sampling) -> None:
    assert sampling_fault(sampling) is None
