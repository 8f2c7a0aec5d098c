"""Greedy, keyed draws and rejection against the reference, chains against the batched kernels, and planted bugs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from outrider.core.sampling import Sampling, Verifier
from outrider.kernels.batched import draft
from outrider.kernels.batched.data import Ask, Chain
from outrider.kernels.batched.verify import verify
from outrider.kernels.reference import noise, rejection, sampling
from outrider.kernels.reference.noise import Purpose
from outrider.kernels.reference.transforms import Support
from outrider.kernels.triton import noise as device_noise
from outrider.kernels.triton import rejection as device_rejection
from outrider.kernels.triton import verify as verdicts
from outrider.kernels.triton.buffers import VerifyBuffers

from .planting import planted

TOP_M = 6


def keys_of(count: int, purpose: Purpose, seed: int = 5) -> torch.Tensor:
    return noise.noise_keys([seed] * count, [0] * count, range(count), purpose)


def scores_of(count: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count * size)
    scores = 6.0 * torch.randn(count, size, generator=generator, dtype=torch.float64)
    scores[torch.rand(count, size, generator=generator) < 0.2] = -math.inf
    scores[:, 0] = 0.3
    return scores


@dataclass(frozen=True)
class Rows:
    """Rows under rejection, as ``rejection.decide`` takes them."""

    support: Support
    tokens: torch.Tensor
    draft_ids: torch.Tensor
    draft_probs: torch.Tensor


def rows_of(count: int, size: int, *, is_sparse: bool) -> Rows:
    """Proposals from distributions near the target's; in every third row with mass where the target has none."""
    generator = torch.Generator().manual_seed(size)
    scores = scores_of(count, size)
    ids = torch.arange(size).expand(count, size)
    if is_sparse:
        ids = torch.stack([torch.randperm(3 * size, generator=generator)[:size].sort().values for _ in range(count)])
    near = scores + 0.7 * torch.randn(count, size, generator=generator, dtype=torch.float64)
    near[::3] = torch.randn(near[::3].shape, generator=generator, dtype=torch.float64)
    top = near.topk(min(TOP_M, size), dim=1)
    probs = torch.zeros(count, TOP_M, dtype=torch.float64)
    probs[:, : top.values.shape[1]] = torch.softmax(top.values, dim=1)
    probs[::4, 3:] = 0.0  # padding, which repeats an id
    probs /= probs.sum(dim=1, keepdim=True)
    draft_ids = torch.zeros(count, TOP_M, dtype=torch.int64)
    draft_ids[:, : top.indices.shape[1]] = ids.gather(1, top.indices)
    draft_ids[::4, 3:] = draft_ids[::4, :1]
    if is_sparse:
        draft_ids[1::4, 2] = 3 * size + 1  # a token that the support lacks
    tokens = draft_ids.gather(1, torch.multinomial(probs, 1, generator=generator))[:, 0]
    return Rows(Support(ids, scores, not is_sparse), tokens, draft_ids, probs)


def decide(rows: Rows, module: ModuleType = device_rejection) -> tuple[torch.Tensor, torch.Tensor]:
    n, size = rows.support.scores.shape
    buffers = VerifyBuffers.allocate(n, size, TOP_M, "cpu")
    buffers.proposed[:], buffers.draft_ids[:], buffers.draft_probs[:] = rows.tokens, rows.draft_ids, rows.draft_probs
    buffers.accept_keys[:], buffers.keys[:] = keys_of(n, Purpose.ACCEPT), keys_of(n, Purpose.RESIDUAL)
    ids = None if rows.support.is_full else rows.support.token_ids
    accepted, own = module.decide(buffers, rows.support.scores, ids)
    return accepted, own.clone()


def check_decide(size: int, *, count: int = 20, is_sparse: bool = False, module: ModuleType = device_rejection) -> None:
    rows = rows_of(count, size, is_sparse=is_sparse)
    keys = keys_of(count, Purpose.ACCEPT), keys_of(count, Purpose.RESIDUAL)
    expected_accepted, expected_own = rejection.decide(
        rows.support, rows.tokens, rows.draft_ids, rows.draft_probs, *keys
    )
    assert 2 <= int(expected_accepted.sum()) <= count - 2
    accepted, own = decide(rows, module)
    assert torch.equal(accepted, expected_accepted)
    assert torch.equal(own, expected_own)


@pytest.mark.parametrize("is_sparse", [False, True], ids=["whole vocabulary", "support"])
@pytest.mark.parametrize("size", [5, 1024, 2000])
def test_rejection_equals_the_reference(size: int, is_sparse: bool) -> None:
    check_decide(size, is_sparse=is_sparse)


def light_rows() -> Rows:
    """p and q are equal but for rounding, and each proposal has probability 0 under both, so that it is rejected."""
    probs = torch.full((8, TOP_M), 0.25, dtype=torch.float64)
    probs[:, 4:] = 0.0
    probs[:, 0] += 1e-12
    scores = torch.full((8, TOP_M), 0.25, dtype=torch.float64).log()
    scores[:, 4:] = -math.inf
    ids = torch.arange(TOP_M).expand(8, TOP_M)
    return Rows(Support(ids, scores, True), torch.full((8,), 5), ids.contiguous(), probs)


def check_light(module: ModuleType = device_rejection) -> None:
    rows = light_rows()
    excess = (torch.softmax(rows.support.scores, dim=1) - rows.draft_probs).clamp(min=0.0).sum(dim=1)
    assert bool((excess < rejection.RESIDUAL_MASS_FLOOR).all())
    expected = sampling.draw(rows.support, keys_of(8, Purpose.RESIDUAL))
    accepted, own = decide(rows, module)
    assert not bool(accepted.any())
    assert torch.equal(own, expected)


def test_a_residual_without_mass_is_drawn_from_p() -> None:
    check_light()


def test_a_row_without_a_proposal_draws_from_p() -> None:
    scores = scores_of(12, 1100)
    buffers = VerifyBuffers.allocate(12, 1100, TOP_M, "cpu")
    buffers.keys[:] = keys_of(12, Purpose.TARGET)
    accepted, own = device_rejection.decide(buffers, scores)
    assert not bool(accepted.any())
    support = Support(torch.arange(1100).expand(12, 1100), scores, True)
    assert torch.equal(own, sampling.draw(support, keys_of(12, Purpose.TARGET)))


def draw(scores: torch.Tensor, ids: torch.Tensor | None, module: ModuleType = verdicts, **given: Any) -> torch.Tensor:
    n, size = scores.shape
    buffers = VerifyBuffers.allocate(n, size, 1, "cpu")
    buffers.keys[:] = keys_of(n, Purpose.COUPLED)
    buffers.proposed[:] = given.get("proposed", -1)
    buffers.temperatures[:] = given.get("temperature", 1.0)
    accepted, own = module.draw(buffers, scores, ids)
    assert torch.equal(accepted, (own == buffers.proposed) & (own >= 0))
    return own.clone()


def check_draw(module: ModuleType = verdicts) -> None:
    scores = scores_of(16, 1100)
    expected = sampling.gumbel_argmax(torch.arange(1100), scores, keys_of(16, Purpose.COUPLED))
    assert len(set(expected.tolist())) > 8
    assert torch.equal(draw(scores, None, module, proposed=int(expected[0])), expected)


def test_draws_equal_the_reference() -> None:
    check_draw()


def test_draws_of_logits_divide_by_the_temperature() -> None:
    logits = scores_of(12, 1500).float()
    expected = sampling.gumbel_argmax(torch.arange(1500), logits.double() / 0.7, keys_of(12, Purpose.COUPLED))
    assert torch.equal(draw(logits, None, temperature=0.7), expected)


def test_draws_from_a_support_are_those_of_its_tokens() -> None:
    rows = rows_of(12, 1030, is_sparse=True).support
    expected = sampling.gumbel_argmax(rows.token_ids, rows.scores, keys_of(12, Purpose.COUPLED))
    assert torch.equal(draw(rows.scores, rows.token_ids), expected)


@triton.jit
def _numbers(keys: tl.tensor, uniform: tl.tensor, noisy: tl.tensor, size: tl.constexpr) -> None:
    row, ids = tl.program_id(0), tl.arange(0, size)
    tl.store(uniform + row * size + ids, device_noise.uniforms(keys, row, ids.to(tl.int64)))
    tl.store(noisy + row * size + ids, device_noise.gumbel(keys, row, ids.to(tl.int64)))


def test_uniforms_have_the_bits_of_the_reference() -> None:
    keys, ids = keys_of(16, Purpose.COUPLED), torch.arange(4096)
    uniform, noisy = (torch.empty(16, 4096, dtype=torch.float64) for _ in range(2))
    _numbers[(16,)](keys, uniform, noisy, 4096)
    assert torch.equal(uniform, noise.uniform_rows(keys, ids))
    torch.testing.assert_close(noisy, noise.gumbel_rows(keys, ids), atol=1e-14, rtol=1e-14)


def greedy(logits: torch.Tensor, module: ModuleType = verdicts) -> torch.Tensor:
    buffers = VerifyBuffers.allocate(*logits.shape, 1, "cpu")
    buffers.proposed[:] = 7
    accepted, own = module.greedy(buffers, logits)
    assert torch.equal(accepted, own == 7)
    return own.clone()


def check_greedy(module: ModuleType = verdicts) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (2 * torch.randn(12, 2500, generator=generator)).round()  # ties inside blocks and across them
    assert torch.equal(greedy(logits, module), logits.max(dim=1).indices)


def test_greedy_takes_the_lowest_of_equals() -> None:
    check_greedy()


def test_rows_without_a_distribution_have_no_token() -> None:
    logits = torch.randn(6, 1200, generator=torch.Generator().manual_seed(0))
    logits[1, 1100], logits[2, 3], logits[4] = math.nan, math.inf, -math.inf
    wrong = torch.tensor([False, True, True, False, True, False])
    assert torch.equal(greedy(logits) < 0, wrong)
    assert torch.equal(draw(logits.double(), None) < 0, wrong)
    buffers = VerifyBuffers.allocate(6, 1200, TOP_M, "cpu")
    buffers.proposed[:], buffers.draft_probs[:, 0] = 0, 1.0
    accepted, own = device_rejection.decide(buffers, logits)
    assert not bool(accepted[wrong].any())
    assert torch.equal((own < 0) & ~accepted, wrong)


@dataclass(frozen=True)
class Step:
    """Chains of one verifier, row after row."""

    chains: list[Chain]
    scores: torch.Tensor
    buffers: VerifyBuffers


def step_of(verifier: Verifier, *, count: int = 12, size: int = 60) -> Step:
    chains: list[Chain] = []
    temperature = 0.0 if verifier is Verifier.GREEDY else 0.9
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        k, first = index % 6, 3 * index
        settings = Sampling(temperature=temperature, top_k=0, top_p=1.0, seed=index, verifier=verifier)
        logits = 2 * torch.randn(k + 1, size, generator=generator)
        near = logits[:k] + 0.5 * torch.randn(k, size, generator=generator)
        drawn = draft.draw(near, [Ask(settings, first + i, i) for i in range(k)], top_m=TOP_M)
        kept = [one for one in drawn if one is not None]
        rows = [(one.token_ids, one.probs) for one in kept if one.token_ids is not None and one.probs is not None]
        chains.append(Chain(logits, settings, first, [one.token for one in kept], rows))
    num_rows = sum(len(chain.logits) for chain in chains)
    buffers = VerifyBuffers.allocate(num_rows, size, TOP_M, "cpu")
    buffers.temperatures[:] = temperature or 1.0
    at = 0
    for index, chain in enumerate(chains):
        buffers.first_rows[index], buffers.num_rows[index] = at, len(chain.logits)
        for i in range(len(chain.logits)):
            has_proposal = i < len(chain.draft_tokens)
            if has_proposal:
                buffers.proposed[at] = chain.draft_tokens[i]
            if chain.draft_rows and has_proposal:
                ids, probs = chain.draft_rows[i]
                buffers.draft_ids[at, : len(ids)] = ids
                buffers.draft_probs[at, : len(ids)] = probs.double() / probs.double().sum()
            purpose = Purpose.RESIDUAL if has_proposal else Purpose.TARGET
            purpose = Purpose.COUPLED if verifier is Verifier.COUPLED else purpose
            for keys, what in ((buffers.keys, purpose), (buffers.accept_keys, Purpose.ACCEPT)):
                keys[at] = noise.noise_keys([chain.sampling.seed], [0], [chain.first_position + i], what)[0]
            at += 1
    return Step(chains, torch.cat([chain.logits for chain in chains]), buffers)


def check_chains(verifier: Verifier, module: ModuleType = verdicts) -> None:
    step = step_of(verifier)
    judge = {
        Verifier.GREEDY: module.greedy,
        Verifier.COUPLED: module.draw,
        Verifier.REJECTION: device_rejection.decide,
    }[verifier]
    judge(step.buffers, step.scores)
    num_accepted, next_tokens = module.commit(step.buffers, len(step.chains), 6)
    expected = verify(step.chains)
    counts = [outcome.num_accepted for outcome in expected]
    assert any(counts)
    assert any(count < len(chain.draft_tokens) for count, chain in zip(counts, step.chains, strict=True))
    assert num_accepted.tolist() == counts
    assert next_tokens.tolist() == [outcome.next_token for outcome in expected]


@pytest.mark.parametrize("verifier", list(Verifier))
def test_chains_end_as_the_batched_kernels_say(verifier: Verifier) -> None:
    check_chains(verifier)


def test_a_rows_verdict_does_not_depend_on_its_company() -> None:
    rows = rows_of(12, 1500, is_sparse=False)
    accepted, own = decide(rows)
    for row in (0, 5, 11):
        scores = rows.support.scores[row : row + 1]
        alone = VerifyBuffers.allocate(1, 4000, TOP_M, "cpu")
        alone.proposed[:], alone.draft_ids[:] = rows.tokens[row], rows.draft_ids[row]
        alone.draft_probs[:] = rows.draft_probs[row]
        alone.accept_keys[:] = keys_of(12, Purpose.ACCEPT)[row]
        alone.keys[:] = keys_of(12, Purpose.RESIDUAL)[row]
        one_accepted, one_own = device_rejection.decide(alone, scores)
        assert (bool(one_accepted[0]), int(one_own[0])) == (bool(accepted[row]), int(own[row]))


def test_what_does_not_fit_is_refused() -> None:
    buffers = VerifyBuffers.allocate(2, 100, 1, "cpu")
    with pytest.raises(ValueError, match="the buffers hold 2 rows"):
        verdicts.greedy(buffers, torch.zeros(3, 100))
    with pytest.raises(ValueError, match="side by side"):
        verdicts.draw(buffers, torch.zeros(100, 2).T)
    with pytest.raises(ValueError, match="token ids are"):
        device_rejection.decide(buffers, torch.zeros(2, 100), torch.zeros(2, 99, dtype=torch.int64))


PLANTED = {
    "not what p has left, but p": ("excess = tl.maximum(p - q, 0.0)", "excess = p + 0.0 * q"),
    "both sides of p - q": ("excess = tl.maximum(p - q, 0.0)", "excess = tl.abs(p - q)"),
    "p is not normalised where the residual is taken": ("p = tl.exp(score - top) / total", "p = tl.exp(score - top)"),
    "p is not normalised where it is accepted": ("/ tl.where(valid, total, 1.0)", ""),
    "the ratio is upside down": ("u * q_token < p_token", "u * p_token < q_token"),
    "a uniform for the row, not for the token": ("(accept_keys, row, token)", "(accept_keys, row, 0 * token)"),
    "only the first entry of q": ("for entry in range(0, top_m):", "for entry in range(0, 1):"),
    "q beside its own tokens": ("ids == draft_id", "ids == draft_id + 1"),
    "only the first block counts in the norm": (
        "tl.load(highest + row * width + part, mask=part < blocks",
        "tl.load(highest + row * width + part, mask=part < 1",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_bugs_planted_in_rejection_are_caught(tmp_path: Path, name: str) -> None:
    module = planted(tmp_path, device_rejection, *PLANTED[name])
    with pytest.raises(AssertionError):
        check_decide(2000, module=module)


def test_other_planted_bugs_are_caught(tmp_path: Path) -> None:
    no_floor = planted(tmp_path, device_rejection, "total < _MASS_FLOOR, other, column", "total < 0.0, other, column")
    with pytest.raises(AssertionError):
        check_light(no_floor)
    no_noise = planted(tmp_path, verdicts, "if is_noisy:", "if False:")
    with pytest.raises(AssertionError):
        check_draw(no_noise)
    source = "score, axis=0, return_indices=True, return_indices_tie_break_left=True)\n    tl.store(best +"
    highest = planted(
        tmp_path,
        verdicts,
        source,
        "score + column * 1e-9, axis=0, return_indices=True, return_indices_tie_break_left=True)\n    tl.store(best +",
    )
    with pytest.raises(AssertionError):
        check_greedy(highest)
    one_more = planted(
        tmp_path, verdicts, "tl.where(stands == 0, row, row_tile)", "tl.where(stands == 0, row + 1, row_tile)"
    )
    with pytest.raises(AssertionError):
        check_chains(Verifier.COUPLED, one_more)


def test_another_hash_is_caught(tmp_path: Path) -> None:
    other = planted(tmp_path, device_noise, "(bits ^ (bits >> 27))", "(bits ^ (bits >> 28))")
    changed = planted(
        tmp_path,
        verdicts,
        "from outrider.kernels.triton.noise import",
        f"from {other.__name__} import",
    )
    with pytest.raises(AssertionError):
        check_draw(changed)
