"""The few processors of our own, and the borders of transformers' filters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from outrider.exactness.processors import MinNewTokens, OutputPenalty, logits_processors, processed, warped

VOCAB = 400


def rows(seed: int = 0, count: int = 30, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def test_output_penalty_counts_the_output_only() -> None:
    penalty = OutputPenalty(prompt_len=2, presence=0.5, frequency=0.25)
    scores = penalty(torch.tensor([[1, 2, 3, 4, 3, 3]]), torch.zeros(1, 6))
    assert scores[0].tolist() == [0.0, 0.0, 0.0, -1.25, -0.75, 0.0]


def test_min_new_tokens_waits_where_only_the_end_is_left() -> None:
    processor = MinNewTokens(prompt_len=1, min_tokens=2, end_token_ids=[0, 1])
    scores = torch.tensor([[1.0, 2.0, 3.0]])
    assert processor(torch.tensor([[5]]), scores)[0].tolist() == [-math.inf, -math.inf, 3.0]
    assert processor(torch.tensor([[5, 6, 7]]), scores)[0].tolist() == [1.0, 2.0, 3.0]
    only_end = torch.tensor([[1.0, -math.inf, -math.inf]])
    assert processor(torch.tensor([[5]]), only_end)[0].tolist() == [1.0, -math.inf, -math.inf]


def test_every_processor_has_its_effect() -> None:
    settings: dict[str, Any] = {
        "logit_bias": {"3": 2.0},
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "allowed_token_ids": [0, 1, 2, 3, 4, 5, 6, 7],
        "banned_token_ids": [5],
        "min_tokens": 4,
    }
    made = logits_processors(
        settings,
        prompt_len=2,
        end_token_ids=[0],
        bad_words_ids=[[6], [3, 7]],
        allowed=lambda ids: [0, 1, 2, 3, 5, 6, 7],
    )
    out = processed(made, torch.tensor([1, 4, 3]), torch.ones(10)).tolist()
    # 3: (1 + 2) / 2 - 1.5; 0 ends the text, 4 is forbidden by the grammar, 5 banned, 6 bad, 7 bad after 3
    assert out[:4] == [-math.inf, 0.5, 1.0, 0.0]
    assert all(value == -math.inf for value in out[4:])


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.8},
        {"min_p": 0.05},
        {"typical_p": 0.7},
        {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9},
        {},
    ],
    ids=str,
)
def test_borders_enclose_what_the_warpers_leave_and_little_more(settings: dict[str, Any]) -> None:
    scores, borders = warped(settings, rows())
    allowed = ~torch.isneginf(scores)
    assert bool((borders.loose | ~allowed).all()), "a token that transformers allows is loose"
    extra = (borders.loose & ~allowed).sum(dim=-1)
    assert float(extra.double().mean()) < 0.5
    assert float(borders.uncertain_mass.max()) < 0.2
    assert float((borders.uncertain_mass > 1e-3).double().mean()) < 0.1


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"typical_p": 0.7}, {"top_k": 30, "top_p": 0.9, "min_p": 0.02}],
    ids=str,
)
def test_a_server_that_rounds_otherwise_stays_within_the_borders(settings: dict[str, Any]) -> None:
    """Logits that differ by 2e-5: what a server allows is loose here, however close to a border it lies."""
    for seed in range(20):
        logits = rows(seed, count=100)
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1000 + seed)) * 2e-5
        _, borders = warped(settings, logits)
        theirs, _ = warped(settings, logits + noise)
        outside = ~torch.isneginf(theirs) & ~borders.loose
        assert int(outside.sum()) == 0


def test_a_tie_at_the_border_is_uncertain() -> None:
    logits = torch.full((1, VOCAB), -20.0)
    logits[0, :4] = torch.tensor([2.0, 1.0, 1.0, 0.0])
    for settings in ({"top_k": 2}, {"top_p": float(torch.softmax(logits.double(), -1)[0, :2].sum())}):
        _, borders = warped(settings, logits)
        assert float(borders.uncertain_mass[0]) > 0.1, settings
        assert borders.loose[0, :3].all()
    _, clear = warped({"top_k": 1}, logits)
    assert float(clear.uncertain_mass[0]) == 0.0
    assert int(clear.loose.sum()) == 1
