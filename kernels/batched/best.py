"""A rank's part of the argmax that decides greedy and unfiltered coupled rows, for rows of many sequences at once.
``reference.vocab_parallel`` is the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.sampling import Sampling, Verifier
from outrider.kernels.batched.wide import wide_draws
from outrider.kernels.cpu.draws import Filters
from outrider.kernels.reference import noise
from outrider.kernels.reference.noise import Purpose
from outrider.kernels.reference.vocab_parallel import local_best


@dataclass(frozen=True)
class BestRows:
    """Rows ``start .. stop - 1`` of some logits: those of one sequence, the first of them for ``first_position``."""

    start: int
    stop: int
    sampling: Sampling
    first_position: int


def best_of(
    logits: Tensor, vocab_offset: int, spans: Sequence[BestRows], *, is_alone: bool = False
) -> tuple[Tensor, Tensor]:
    """``local_best`` for all rows of the spans, in their order, on the CPU.

    Args:
        logits: [n, V_local] float32, tokens ``vocab_offset`` and following.
        is_alone: whether this is the whole vocabulary. Nobody compares the values then, which are 0 where there is a
            token.

    Returns:
        values [m] float64 and tokens [m] int64.
    """
    every = [
        (row, span, span.first_position + row - span.start) for span in spans for row in range(span.start, span.stop)
    ]
    columns = _columns(logits, vocab_offset, every)
    tokens = torch.tensor(columns, dtype=torch.int64) + vocab_offset
    values = torch.zeros(len(every), dtype=torch.float64)
    decided = [at for at, column in enumerate(columns) if column >= 0]
    if decided and not is_alone:
        values[decided] = _values(logits, vocab_offset, [every[at] for at in decided], [columns[at] for at in decided])
    at = 0
    for span in spans:
        here = slice(at, at := at + span.stop - span.start)
        if min(columns[here]) < 0:
            values[here], tokens[here] = (part.cpu() for part in _local_best(logits, vocab_offset, span))
    return values, tokens


_Places = Sequence[tuple[int, BestRows, int]]  # rows: index, span, position


def _columns(logits: Tensor, vocab_offset: int, every: _Places) -> list[int]:
    """The best column of each row; -1 where compiled passes do not decide it."""
    columns = [-1] * len(every)
    draws = wide_draws(logits)
    if draws is None:
        return columns
    greedy = [at for at, (_, span, _) in enumerate(every) if span.sampling.verifier is Verifier.GREEDY]
    coupled = [at for at, (_, span, _) in enumerate(every) if span.sampling.verifier is not Verifier.GREEDY]
    found = draws.argmax([logits[every[at][0]] for at in greedy]) if greedy else []
    if coupled:
        chosen = [every[at] for at in coupled]
        filters = Filters.none(len(chosen), [span.sampling.temperature for _, span, _ in chosen])
        found += draws.draw(
            [logits[row] for row, _, _ in chosen], filters, [_key(*one) for one in chosen], vocab_offset
        )
    for at, column in zip([*greedy, *coupled], found, strict=True):
        columns[at] = column
    return columns


def _values(logits: Tensor, vocab_offset: int, chosen: _Places, columns: Sequence[int]) -> Tensor:
    """What ``local_best`` gives, bit for bit, for rows whose best columns are known: [n] float64."""
    best = torch.stack([logits[row, column] for (row, _, _), column in zip(chosen, columns, strict=True)])
    values = best.to(torch.float64)
    sampled = [at for at, (_, span, _) in enumerate(chosen) if span.sampling.verifier is not Verifier.GREEDY]
    if sampled:
        keys = noise.key_tensor([_key(*chosen[at]) for at in sampled])
        ids = torch.tensor([[columns[at] + vocab_offset] for at in sampled])
        heat = torch.tensor([chosen[at][1].sampling.temperature for at in sampled], dtype=torch.float64)
        values[sampled] = noise.gumbel_rows(keys, ids)[:, 0] + values[sampled] / heat
    return values


def _key(row: int, span: BestRows, position: int) -> tuple[int, int]:
    return noise.noise_key(span.sampling.seed, span.sampling.choice, position, Purpose.COUPLED)


def _local_best(logits: Tensor, vocab_offset: int, span: BestRows) -> tuple[Tensor, Tensor]:
    return local_best(
        logits[span.start : span.stop],
        vocab_offset,
        first_position=span.first_position,
        temperature=span.sampling.temperature,
        seed=span.sampling.seed,
        choice=span.sampling.choice,
        verifier=span.sampling.verifier.label,
    )
