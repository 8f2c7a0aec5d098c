"""Verification against a slow, obvious implementation, and the inputs that broke other systems.

``slow_verify`` walks the chain token by token with Python numbers; it shares with the product only the keyed noise and
``log_probs``, which have tests of their own.
"""

import math
import random

import pytest
import torch

from outrider.kernels.reference import draft, noise, rejection, transforms, verify
from outrider.kernels.reference.errors import InvalidLogitsError
from outrider.kernels.reference.noise import Purpose
from outrider.kernels.reference.verify import Verdict

VOCAB_SIZE = 12
FILTERS = [
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    {"temperature": 0.6, "top_k": 4, "top_p": 1.0},
    {"temperature": 1.4, "top_k": 0, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 6, "top_p": 0.7},
]


def slow_draw(weights: dict[int, float], seed: int, choice: int, position: int, purpose: Purpose) -> int:
    key = noise.noise_key(seed, choice, position, purpose)
    best, best_score = -1, -math.inf
    for token in sorted(weights):
        if weights[token] <= 0.0:
            continue
        score = math.log(weights[token]) - math.log(-math.log(noise.uniform(key, token)))
        if score > best_score:
            best, best_score = token, score
    return best


def slow_verify(
    logits: torch.Tensor,
    tokens: list[int],
    rows: list[tuple[torch.Tensor, torch.Tensor]] | None,
    *,
    first_position: int,
    seed: int,
    choice: int,
    verifier: str,
    **filters: float,
) -> Verdict:
    for i in range(len(tokens) + 1):
        position = first_position + i
        if verifier == "greedy":
            row = logits[i].tolist()
            own = min(token for token in range(len(row)) if row[token] == max(row))
            if i == len(tokens) or own != tokens[i]:
                return Verdict(i, own)
            continue
        p = dict(enumerate(transforms.log_probs(logits[i : i + 1], **filters)[0].exp().tolist()))
        if verifier == "coupled":
            own = slow_draw(p, seed, choice, position, Purpose.COUPLED)
            if i == len(tokens) or own != tokens[i]:
                return Verdict(i, own)
            continue
        if i == len(tokens):
            return Verdict(i, slow_draw(p, seed, choice, position, Purpose.TARGET))
        if rows is None:
            q = {tokens[i]: 1.0}
        else:
            q = dict(zip(rows[i][0].tolist(), rows[i][1].tolist(), strict=True))
            q = {token: value / math.fsum(q.values()) for token, value in q.items()}
        u = noise.uniform(noise.noise_key(seed, choice, position, Purpose.ACCEPT), tokens[i])
        if not u < p[tokens[i]] / q[tokens[i]]:
            residual = {token: max(p[token] - q.get(token, 0.0), 0.0) for token in p}
            return Verdict(i, slow_draw(residual, seed, choice, position, Purpose.RESIDUAL))
    raise AssertionError("not reached")


def random_case(rng: random.Random, verifier: str, filters: dict) -> dict:
    """A chain that a draft proposed from rows near the target's."""
    k = rng.randrange(0, 6)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    logits = torch.randn(k + 1, VOCAB_SIZE, generator=generator) * 2
    draft_logits = logits[:k] + torch.randn(k, VOCAB_SIZE, generator=generator) * 0.7
    name = {"seed": rng.randrange(2**64), "choice": rng.randrange(3)}
    first = rng.randrange(1000)
    tokens, rows = [], []
    for i in range(k):
        token, token_ids, probs = draft.draw(
            draft_logits[i], first + i, verifier=verifier, prefix_hash=i, top_m=rng.randrange(1, 13), **name, **filters
        )
        tokens.append(token)
        rows.append((token_ids, probs))
    one_hot = verifier != "rejection" or rng.random() < 0.3
    return {
        "logits": logits,
        "draft_tokens": tokens,
        "draft_rows": None if one_hot else rows,
        "first_position": first,
        "verifier": verifier,
        **name,
        **filters,
    }


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("verifier", ["greedy", "rejection", "coupled"])
def test_verdicts_equal_the_slow_ones(verifier: str, filters: dict) -> None:
    rng = random.Random(f"{verifier} {filters}")
    accepted, rejected, bonus = 0, 0, 0
    for _ in range(150):
        case = random_case(rng, verifier, filters)
        verdict = verify.verify_chain(**case)
        k = len(case["draft_tokens"])
        slow = {name: value for name, value in case.items() if name not in ("logits", "draft_tokens", "draft_rows")}
        assert verdict == slow_verify(case["logits"], case["draft_tokens"], case["draft_rows"], **slow)
        accepted += verdict.num_accepted
        rejected += verdict.num_accepted < k
        bonus += verdict.num_accepted == k > 0
    assert min(accepted, rejected, bonus) > 10  # else the comparison saw too little


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("verifier", ["greedy", "rejection", "coupled"])
def test_chains_of_a_batch_are_independent(verifier: str, filters: dict) -> None:
    """Cases S6 and S8: each chain's outcome is its own, whatever the seeds and rows of the others."""
    generator = torch.Generator().manual_seed(5)
    count, k, m = 40, 3, 5
    logits = torch.randn(count, k + 1, VOCAB_SIZE, generator=generator) * 2
    logits[7, 0, 3] = math.nan
    logits[8, 2:] = math.nan
    tokens = torch.empty(count, k, dtype=torch.int64)
    rows = []
    names = {"seeds": [i * 977 for i in range(count)], "choices": [i % 3 for i in range(count)]}
    positions = [10 + i for i in range(count)]
    for i in range(k):
        draft_logits = torch.randn(count, VOCAB_SIZE, generator=generator) + torch.nan_to_num(logits[:, i])
        draws = draft.draw_rows(
            draft_logits,
            [position + i for position in positions],
            verifier=verifier,
            prefix_hashes=[i] * count,
            top_m=m,
            **names,
            **filters,
        )
        tokens[:, i] = draws.tokens
        rows.append((draws.token_ids, draws.probs))
    rows = rows if verifier == "rejection" else None
    verdicts = verify.verify_chains(
        logits, tokens, rows, first_positions=positions, verifier=verifier, **names, **filters
    )
    for j in range(count):
        try:
            alone = verify.verify_chain(
                logits[j],
                tokens[j].tolist(),
                [(token_ids[j], probs[j]) for token_ids, probs in rows] if rows else None,
                first_position=positions[j],
                seed=names["seeds"][j],
                choice=names["choices"][j],
                verifier=verifier,
                **filters,
            )
        except InvalidLogitsError:
            assert j in (7, 8)
            assert verdicts.next_tokens[j] == -1
            continue
        assert alone == Verdict(int(verdicts.num_accepted[j]), int(verdicts.next_tokens[j]))
    assert verdicts.next_tokens[7] == -1
    assert verdicts.num_accepted.unique().numel() > 1


PLAIN = {"first_position": 20, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "choice": 0}


def one_hot_logits(*tokens: int) -> torch.Tensor:
    logits = torch.full((len(tokens), 6), -math.inf)
    for i, token in enumerate(tokens):
        logits[i, token] = 0.0
    return logits


@pytest.mark.parametrize("verifier", ["greedy", "rejection", "coupled"])
def test_a_needed_row_that_is_invalid_fails_the_request(verifier: str) -> None:
    """Case S8, with each kind of invalid row, in each place where it is needed."""
    for bad in (math.nan, math.inf):
        for i in range(3):
            logits = one_hot_logits(1, 2, 3)
            logits[i, 4] = bad
            with pytest.raises(InvalidLogitsError, match=f"position {20 + i}"):
                verify.verify_chain(logits, [1, 2], None, seed=1, verifier=verifier, **PLAIN)
    with pytest.raises(InvalidLogitsError, match="position 20"):
        verify.verify_chain(torch.full((1, 6), -math.inf), [], None, seed=1, verifier=verifier, **PLAIN)
    with pytest.raises(InvalidLogitsError, match="position 20"):
        verify.verify_chain(torch.full((1, 6), math.nan), [], None, seed=1, verifier=verifier, **PLAIN)


@pytest.mark.parametrize("verifier", ["greedy", "rejection", "coupled"])
def test_rows_after_the_first_rejection_are_not_looked_at(verifier: str) -> None:
    logits = one_hot_logits(1, 2, 3)
    logits[2] = math.nan
    assert verify.verify_chain(logits, [1, 5], None, seed=1, verifier=verifier, **PLAIN) == Verdict(1, 2)


BROKEN_ROWS = {
    "NaN": ([0, 1, 2], [math.nan, 0.5, 0.5]),
    "sums to 0": ([0, 1, 2], [0.0, 0.0, 0.0]),
    "sums to 2": ([0, 1, 2], [1.0, 0.5, 0.5]),
    "infinite": ([0, 1, 2], [math.inf, 0.5, 0.5]),
    "negative": ([0, 1, 2], [0.75, 0.5, -0.25]),
    "token missing": ([0, 1, 3], [0.5, 0.25, 0.25]),
    "token has no probability": ([0, 1, 2], [0.5, 0.5, 0.0]),
    "a token twice": ([2, 2, 1], [0.5, 0.25, 0.25]),
    "outside the vocabulary": ([2, 6, 1], [0.5, 0.25, 0.25]),
    "negative id": ([2, -1, 1], [0.5, 0.25, 0.25]),
    "empty": ([], []),
    "lengths differ": ([2, 1], [1.0]),
}


@pytest.mark.parametrize("name", BROKEN_ROWS)
def test_a_broken_draft_row_counts_as_no_proposal(name: str) -> None:
    """Case S9: everything from that row on is the target's own, as if the chain had ended there."""
    good = (torch.tensor([1, 2]), torch.tensor([0.5, 0.5]))
    broken = (torch.tensor(BROKEN_ROWS[name][0]), torch.tensor(BROKEN_ROWS[name][1]))
    outcomes = set()
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(4, 6, generator=generator)
        whole = verify.verify_chain(logits, [1, 2, 1], [good, broken, good], seed=seed, verifier="rejection", **PLAIN)
        short = verify.verify_chain(logits[:2], [1], [good], seed=seed, verifier="rejection", **PLAIN)
        assert whole == short
        first = verify.verify_chain(logits[:2], [2], [broken], seed=seed, verifier="rejection", **PLAIN)
        assert first == verify.verify_chain(logits[:1], [], None, seed=seed, verifier="rejection", **PLAIN)
        outcomes.add(whole.num_accepted)
    assert outcomes == {0, 1}


@pytest.mark.parametrize("token", [-1, 6, 2**40])
@pytest.mark.parametrize("verifier", ["greedy", "rejection", "coupled"])
def test_a_proposal_outside_the_vocabulary_counts_as_absent(verifier: str, token: int) -> None:
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    plain = verify.verify_chain(logits[:1], [], None, seed=1, verifier=verifier, **PLAIN)
    assert verify.verify_chain(logits, [token, 1], None, seed=1, verifier=verifier, **PLAIN) == plain
    rows = [(torch.tensor([token, 1]), torch.tensor([0.5, 0.5])), (torch.tensor([1]), torch.tensor([1.0]))]
    assert verify.verify_chain(logits, [token, 1], rows, seed=1, verifier=verifier, **PLAIN) == plain


def test_acceptance_is_strict() -> None:
    """Nothing of probability 0 is accepted, at the ends of every interval."""
    zero, one, half = (torch.tensor([value], dtype=torch.float64) for value in (0.0, 1.0, 0.5))
    assert not rejection.accepts(zero, zero, half)
    assert not rejection.accepts(half, zero, zero)
    assert not rejection.accepts(half, half, one)
    assert rejection.accepts(half, half, torch.nextafter(one, zero))


def test_a_token_that_a_filter_excludes_is_never_accepted() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]] * 2)
    options = PLAIN | {"top_k": 2}
    for seed in range(50):
        for token in (2, 5):
            row = [(torch.tensor([token, 0]), torch.tensor([1e-6, 1 - 1e-6]))]
            for rows in (None, row):
                verdict = verify.verify_chain(logits, [token], rows, seed=seed, verifier="rejection", **options)
                assert verdict.num_accepted == 0
                assert verdict.next_token in (0, 1)


def test_the_residual_is_the_normalised_excess() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.6, 0.0, 0.2]], dtype=torch.float64)
    torch.testing.assert_close(rejection.residual(p, q), torch.tensor([[0.6, 0.0, 0.4, 0.0]], dtype=torch.float64))


def test_a_residual_lighter_than_the_bound_falls_back_to_p() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    for shift, falls_back in ((0.9e-9, True), (1.1e-9, False), (0.0, True)):
        q = p + torch.tensor([[shift, -shift, 0.0]], dtype=torch.float64)
        assert torch.equal(rejection.residual(p, q), p) == falls_back


def test_equal_distributions_accept_everything() -> None:
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(3))
    token_ids, probs = transforms.truncate(transforms.log_probs(logits[:1])[0], 6)
    for seed in range(200):
        verdict = verify.verify_chain(
            logits, [seed % 6], [(token_ids, probs)], seed=seed, verifier="rejection", **PLAIN
        )
        assert verdict.num_accepted == 1


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
def test_rounds_without_proposals_move_no_stream(verifier: str) -> None:
    """Case S7: the draw at a position is the same after any number of other draws, and as a full block's bonus."""
    certain = one_hot_logits(1, 2, 3)
    logits = torch.cat([certain, torch.zeros(1, 6)])
    options = {"seed": 11, "verifier": verifier} | PLAIN
    plain = verify.verify_chain(logits[3:], [], None, **options | {"first_position": 23})
    for _ in range(3):
        assert verify.verify_chain(logits[3:], [], None, **options | {"first_position": 23}) == plain
    for k in range(1, 4):
        block = verify.verify_chain(logits[3 - k :], [1, 2, 3][3 - k :], None, **options | {"first_position": 23 - k})
        assert block == Verdict(k, plain.next_token)


def test_coupled_text_does_not_depend_on_what_was_proposed() -> None:
    logits = torch.randn(60, 6, generator=torch.Generator().manual_seed(8))
    options = PLAIN | {"seed": 3, "verifier": "coupled"}
    plain = [
        verify.verify_chain(logits[t : t + 1], [], None, **options | {"first_position": t}).next_token
        for t in range(50)
    ]
    rng = random.Random(1)
    for _ in range(5):
        text: list[int] = []
        while len(text) < 50:
            t, k = len(text), rng.randrange(0, 9)
            right = (plain[t : t + k] + [0] * k)[:k]
            proposal = [rng.choice([token, rng.randrange(6)]) for token in right]
            verdict = verify.verify_chain(logits[t : t + k + 1], proposal, None, **options | {"first_position": t})
            text += [*proposal[: verdict.num_accepted], verdict.next_token]
        assert text[:50] == plain


def test_shapes_and_settings_are_checked() -> None:
    logits = torch.zeros(3, 6)
    with pytest.raises(ValueError, match="3 logits rows fit 2 proposals"):
        verify.verify_chain(logits, [1], None, seed=1, verifier="greedy", **PLAIN)
    row = (torch.tensor([1]), torch.tensor([1.0]))
    with pytest.raises(ValueError, match="q rows"):
        verify.verify_chain(logits, [1, 1], [row], seed=1, verifier="rejection", **PLAIN)
    with pytest.raises(ValueError, match="verifier"):
        verify.verify_chain(logits[:1], [], None, seed=1, verifier="typical", **PLAIN)
    with pytest.raises(ValueError, match="temperature"):
        verify.verify_chain(logits[:1], [], None, seed=1, verifier="coupled", **PLAIN | {"temperature": 0.0})
