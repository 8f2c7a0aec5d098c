"""Random settings, texts and rows for the kernels, by hypothesis."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from outrider.core.logprobs import LogprobsMode
from outrider.core.sampling import Sampling, Verifier

VOCAB_SIZE = 24
END_TOKENS = (3, 7)

# Masses and ratios of random rows do not fall on these by accident of rounding.
CONTROL_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "logit_bias": st.dictionaries(
        st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, -3.1, 0.7, 5.3, 100.0]), min_size=1, max_size=5
    ).map(lambda biases: tuple(sorted(biases.items()))),
    "repetition_penalty": st.sampled_from([0.01, 0.83, 1.37, 10.0]),
    "presence_penalty": st.sampled_from([-2.0, -0.61, 0.3, 2.0]),
    "frequency_penalty": st.sampled_from([-2.0, -0.17, 0.9, 2.0]),
    "bad_words": st.lists(
        st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6, unique=True
    ).map(lambda words: tuple(sorted(words))),
    "allowed_token_ids": st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1).map(lambda ids: tuple(sorted(ids))),
    "banned_token_ids": st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9).map(
        lambda ids: tuple(sorted(ids))
    ),
    "min_tokens": st.integers(1, 6).map(lambda number: (number, END_TOKENS)),
    "min_p": st.sampled_from([0.013, 0.171, 0.63, 1.0]),
    "typical_p": st.sampled_from([0.0731, 0.3137, 0.6713, 0.9137]),
}


@st.composite
def samplings(draw: st.DrawFn, names: tuple[str, ...] = tuple(CONTROL_VALUES)) -> Sampling:
    """Settings with any of the named controls."""
    chosen = draw(st.sets(st.sampled_from(names), max_size=4)) if len(names) > 1 else set(names)
    verifier = draw(st.sampled_from(list(Verifier)))
    return Sampling(
        temperature=0.0 if verifier is Verifier.GREEDY else draw(st.sampled_from([0.6, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 0, 1, 5, 12, 23, 24, 99])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9137, 0.6181, 0.0001])),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(st.integers(0, 3)),
        verifier=verifier,
        controls=tuple((name, draw(CONTROL_VALUES[name])) for name in sorted(chosen)),
        prompt_len=draw(st.integers(0, 6)),
        logprobs=draw(st.sampled_from([None, 0, 1, 5, 20])),
        logprobs_mode=draw(st.sampled_from(list(LogprobsMode))),
    )


@st.composite
def texts(draw: st.DrawFn, sampling: Sampling) -> list[int]:
    """A prompt and some output. Few different tokens, so that they repeat and complete bad words."""
    extra = draw(st.integers(0, 5))
    some = st.sampled_from([0, 1, 2, 3, 9, 17])
    return draw(st.lists(some, min_size=sampling.prompt_len + extra, max_size=sampling.prompt_len + extra))


def row_of(seed: int, *, num_rows: int = 1, is_coarse: bool = False) -> torch.Tensor:
    """[num_rows, VOCAB_SIZE] float32. Coarse rows have ties everywhere, and tokens at -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 2.5
    if is_coarse:
        logits = (logits * 2).round() / 2
        logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
        logits[:, int(seed) % VOCAB_SIZE] = 1.0
    return logits


@st.composite
def masks(draw: st.DrawFn, num_rows: int) -> torch.Tensor | None:
    """What a grammar might allow: [num_rows, VOCAB_SIZE] bool, few tokens, half, or one."""
    share = draw(st.sampled_from([None, None, 0.05, 0.5, 0.95]))
    if share is None:
        return None
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    allowed = torch.rand(num_rows, VOCAB_SIZE, generator=generator) < share
    allowed[:, draw(st.integers(0, VOCAB_SIZE - 1))] = True
    return allowed
