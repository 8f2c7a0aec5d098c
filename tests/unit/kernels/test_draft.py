"""What a draft proposes and reports."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from outrider.kernels.reference import draft, noise, transforms
from outrider.kernels.reference.errors import InvalidLogitsError

LOGITS = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)) * 2
OPTIONS = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "top_m": 8}
NAMES = {"positions": [9, 9, 10, 11, 12, 13], "seeds": [1, 2, 1, 2**64 - 1, 0, 5], "choices": [0, 0, 1, 0, 2, 0]}
HASHES = [3, 3, 4, 5, 6, 7]


def draw(i: int, verifier: str, logits: torch.Tensor = LOGITS, **changes: object) -> tuple:
    options = OPTIONS | {"seed": NAMES["seeds"][i], "choice": NAMES["choices"][i], "prefix_hash": HASHES[i]} | changes
    return draft.draw(logits[i], NAMES["positions"][i], verifier=verifier, **options)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 12, "top_p": 0.8}], ids=str)
@pytest.mark.parametrize("verifier", ["greedy", "rejection", "coupled"])
def test_rows_of_a_batch_are_independent(verifier: str, filters: dict) -> None:
    """Cases S6 and S9: requests with other seeds, and a broken row, leave a row's draw as it is alone."""
    logits = LOGITS.clone()
    logits[3, 7] = math.nan
    draws = draft.draw_rows(logits, verifier=verifier, prefix_hashes=HASHES, **NAMES, **(OPTIONS | filters))
    for i in range(6):
        if i == 3:
            assert draws.tokens[i] == -1
            with pytest.raises(InvalidLogitsError, match="position 11"):
                draw(i, verifier, logits, **filters)
            continue
        token, token_ids, probs = draw(i, verifier, **filters)
        assert draws.tokens[i] == token
        if verifier == "rejection":
            positive = draws.probs[i] > 0
            assert torch.equal(draws.token_ids[i, positive], token_ids)
            torch.testing.assert_close(draws.probs[i, positive], probs, rtol=1e-6, atol=0)
        else:
            assert token_ids is None
            assert probs is None
            assert draws.token_ids is None


def test_the_row_that_travels_is_the_row_that_was_sampled() -> None:
    """Case S4: over many seeds, tokens come as often as the reported row says; nothing outside it comes at all."""
    num_draws = 20_000
    draws = draft.draw_rows(
        LOGITS[:1].expand(num_draws, -1),
        [9] * num_draws,
        seeds=range(num_draws),
        choices=[0] * num_draws,
        verifier="rejection",
        prefix_hashes=[3] * num_draws,
        **OPTIONS,
    )
    token_ids, probs = draws.token_ids[0], draws.probs[0].double()
    assert len(token_ids) == OPTIONS["top_m"]
    expected_ids, expected = transforms.truncate(transforms.log_probs(LOGITS[:1], temperature=0.9)[0], 8)
    assert torch.equal(token_ids, expected_ids)
    torch.testing.assert_close(probs.float(), expected)
    counts = np.array([int((draws.tokens == token).sum()) for token in token_ids])
    assert counts.sum() == num_draws
    assert scipy.stats.chisquare(counts, num_draws * (probs / probs.sum()).numpy()).pvalue > 1e-4


def test_a_row_can_travel() -> None:
    """What the wire demands: positive probabilities that sum to 1, distinct ids, the token among them."""
    for i in range(6):
        token, token_ids, probs = draw(i, "rejection", top_k=5)
        assert token_ids.dtype == torch.int64
        assert probs.dtype == torch.float32
        assert len(token_ids) == len(set(token_ids.tolist())) == 5
        assert float(probs.min()) > 0.0
        assert abs(float(probs.double().sum()) - 1.0) < 1e-6
        assert token in token_ids


def test_a_certain_token_has_a_row_of_one() -> None:
    token, token_ids, probs = draw(0, "rejection", temperature=1e-4)
    assert token == int(LOGITS[0].argmax())
    assert token_ids.tolist() == [token]
    assert probs.tolist() == [1.0]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert draft.draw(
        torch.tensor([0.0, 2.0, 2.0]), 5, verifier="greedy", seed=1, choice=0, prefix_hash=0, **OPTIONS
    ) == (
        1,
        None,
        None,
    )


def test_a_draft_of_its_own_depends_on_the_prefix_and_a_coupled_one_does_not() -> None:
    flat = torch.zeros(6, 40)
    own = {draw(0, "rejection", flat, top_m=40, prefix_hash=h)[0] for h in range(30)}
    assert len(own) > 5
    assert len({draw(0, "coupled", flat, prefix_hash=h)[0] for h in range(30)}) == 1


def test_coupled_uses_the_noise_that_the_target_uses_over_the_whole_support() -> None:
    for i in range(6):
        key = noise.noise_key(NAMES["seeds"][i], NAMES["choices"][i], NAMES["positions"][i], noise.Purpose.COUPLED)
        scores = transforms.log_probs(LOGITS[i : i + 1], temperature=0.9)[0] + noise.gumbel(key, torch.arange(40))
        assert draw(i, "coupled", top_m=1)[0] == int(scores.argmax())


@pytest.mark.parametrize("verifier", ["greedy", "rejection", "coupled"])
@pytest.mark.parametrize("row", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]], ids=str)
def test_an_invalid_row_proposes_nothing(verifier: str, row: list[float]) -> None:
    """Case S9, the draft's side."""
    with pytest.raises(InvalidLogitsError):
        draft.draw(torch.tensor(row), 5, verifier=verifier, seed=1, choice=0, prefix_hash=0, **OPTIONS)


def test_an_unknown_verifier_is_refused() -> None:
    with pytest.raises(ValueError, match="verifier"):
        draw(0, "typical")
