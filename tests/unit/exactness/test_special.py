"""The distribution functions against scipy's."""

import pytest
import scipy.stats

from outrider.exactness import power
from outrider.exactness.special import (
    chi2_quantile,
    chi2_sf,
    kolmogorov_sf,
    noncentral_chi2_sf,
    normal_two_sided,
)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 15, 16, 40])
def test_chi_square(freedom: int) -> None:
    for x in (0.0, 0.1, 1.0, 10.0, 40.0, 90.0, 300.0):
        assert chi2_sf(x, freedom) == pytest.approx(scipy.stats.chi2.sf(x, freedom), rel=1e-11, abs=1e-300)
    for tail in (0.5, 1e-3, 2.5e-5, 1e-12):
        assert chi2_quantile(tail, freedom) == pytest.approx(scipy.stats.chi2.isf(tail, freedom), rel=1e-9)
    for shift in (0.0, 0.5, 30.0, 120.0):
        wanted = scipy.stats.ncx2.sf(60.0, freedom, shift) if shift else scipy.stats.chi2.sf(60.0, freedom)
        assert noncentral_chi2_sf(60.0, freedom, shift) == pytest.approx(wanted, rel=1e-8, abs=1e-13)


def test_chi_square_needs_a_degree_of_freedom() -> None:
    with pytest.raises(ValueError, match="freedom is 0"):
        chi2_sf(1.0, 0)


def test_normal_and_kolmogorov() -> None:
    for z in (0.0, 1.0, -4.0, 9.0):
        assert normal_two_sided(z) == pytest.approx(2 * scipy.stats.norm.sf(abs(z)), rel=1e-12)
    for count in (500, 10_000):
        for tail in (0.3, 1e-2, 2.5e-5):
            distance = scipy.stats.kstwo.isf(tail, count)
            assert kolmogorov_sf(distance, count) == pytest.approx(tail, rel=0.1)
    assert kolmogorov_sf(0.0, 100) == 1.0


def test_needed_noncentrality_gives_the_power() -> None:
    needed = power.needed_noncentrality(15, 2.5e-5)
    bound = scipy.stats.chi2.isf(2.5e-5, 15)
    assert scipy.stats.ncx2.sf(bound, 15, needed) == pytest.approx(0.99, abs=1e-9)


def test_greedy_needs_few_tokens() -> None:
    assert power.greedy_tokens_needed(0.02) == 228
    assert power.greedy_smallest_deviation(228) == pytest.approx(0.02, rel=0.01)
    assert power.greedy_smallest_deviation(0) == power.smallest_deviation(0, freedom=15, level=1e-5) == 1.0
