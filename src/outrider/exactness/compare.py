"""The server with speculation against the same server without.

Where the server promises that the seed alone decides the text (greedy and coupled verification with row-invariant
kernels), the same requests must give the same tokens. Elsewhere two samples are compared: by their u, which makes rows
of any kind comparable and cancels whatever the oracle itself gets wrong, and by the tokens that follow shared prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.exactness.evidence import Evidence
from outrider.exactness.family import BIN_EDGES, MIN_COUNT, merged
from outrider.exactness.sampler import Text
from outrider.exactness.special import chi2_sf

MIN_CELL = 10.0  # tokens that a cell of the smaller sample must expect


def different_texts(one: Sequence[Text], other: Sequence[Text]) -> list[str]:
    """What differs between texts of the same requests, in words; empty where all tokens are equal."""
    found = []
    for left, right in zip(one, other, strict=True):
        if left.output != right.output:
            pairs = zip(left.output, right.output, strict=False)
            index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left.output), len(right.output)))
            found.append(f"seed {left.seed}, choice {left.choice}: from token {index} of the output on")
    return found


def two_samples(one: Evidence, other: Evidence, num_speculative_tokens: int) -> dict[str, float]:
    """p-values of tests whether both have one distribution."""
    if min(len(one), len(other)) < MIN_COUNT:
        return {}
    p_values = {}
    for order in ("likelihood", "shuffle"):
        counts = np.stack([np.histogram(sample.u[order], BIN_EDGES)[0] for sample in (one, other)])
        p_values[f"with and without speculation, u by {order}"] = homogeneity_test([counts])
    # The first token after the prompt is never a proposal. The next one is the first of the first proposal's places,
    # the k-th after it lies behind the whole of it.
    for index in sorted({1, 1 + num_speculative_tokens}):
        p_values[f"with and without speculation, token {index} of the output"] = homogeneity_test(
            _tables(one, other, index)
        )
    return p_values


def homogeneity_test(tables: Sequence[np.ndarray]) -> float:
    """Chi-square over independent tables [2, C] of counts; categories are merged until each sample expects enough."""
    statistic, freedom = 0.0, 0
    for table in tables:
        totals = table.sum(axis=1, keepdims=True).astype(float)
        if not totals.all():
            continue
        shares = table.sum(axis=0) / totals.sum()
        groups = merged(shares * float(totals.min()), MIN_CELL)
        if groups.max() == 0:
            continue
        seen = np.stack([np.bincount(groups, row) for row in table])
        expected = totals * np.bincount(groups, shares)
        statistic += float(((seen - expected) ** 2 / expected).sum())
        freedom += int(groups.max())
    return chi2_sf(statistic, freedom) if freedom else 1.0


def _tables(one: Evidence, other: Evidence, index: int) -> list[np.ndarray]:
    """For each prompt, how often each token stood at that place of the output, in both samples; frequent ones first."""
    tables = []
    at = [sample.where(sample.index == index) for sample in (one, other)]
    for prompt in np.unique(np.concatenate([sample.prompt for sample in at])):
        tokens = [sample.token[sample.prompt == prompt] for sample in at]
        names, where = np.unique(np.concatenate(tokens), return_inverse=True)
        left, right = where[: len(tokens[0])], where[len(tokens[0]) :]
        table = np.stack([np.bincount(part, minlength=len(names)) for part in (left, right)])
        tables.append(table[:, np.argsort(-table.sum(axis=0), kind="stable")])
    return tables
