"""A rank's part of the argmax that decides greedy and unfiltered coupled rows (``reference.vocab_parallel``), for rows of
many sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.sampling import Sampling, Verifier
from outrider.kernels.batched.rows import take
from outrider.kernels.batched.wide import wide_draws
from outrider.kernels.cpu.draws import Draws
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


def best_of(logits: Tensor, vocab_offset: int, spans: Sequence[BestRows]) -> tuple[Tensor, Tensor]:
    """``local_best`` for all rows of the spans, in their order, on the CPU.

    Args:
        logits: [n, V_local] float32, tokens ``vocab_offset`` and following.
        spans: ascending.

    Returns:
        values [m] float64 and tokens [m] int64.
    """
    num_rows = sum(span.stop - span.start for span in spans)
    values = torch.empty(num_rows, dtype=torch.float64)
    tokens = torch.empty(num_rows, dtype=torch.int64)
    draws = wide_draws(logits)
    if draws is not None and num_rows:
        _decide_compiled(draws, logits, vocab_offset, spans, values, tokens)
    else:
        tokens.fill_(-1)
    at = 0
    for span in spans:
        here = slice(at, at := at + span.stop - span.start)
        if bool((tokens[here] < 0).any()):
            sampling = span.sampling
            own = local_best(
                logits[span.start : span.stop],
                vocab_offset,
                first_position=span.first_position,
                temperature=sampling.temperature,
                seed=sampling.seed,
                choice=sampling.choice,
                verifier=sampling.verifier.label,
            )
            values[here], tokens[here] = own[0].cpu(), own[1].cpu()
    return values, tokens


def _decide_compiled(
    draws: Draws, logits: Tensor, vocab_offset: int, spans: Sequence[BestRows], values: Tensor, tokens: Tensor
) -> None:
    """Fill in values and tokens, [m] each: token -1 where a row is undecided."""
    every = [
        (row, span, span.first_position + row - span.start) for span in spans for row in range(span.start, span.stop)
    ]
    for is_greedy in (True, False):
        places = [at for at, (_, span, _) in enumerate(every) if (span.sampling.verifier is Verifier.GREEDY) == is_greedy]
        if not places:
            continue
        chosen = [every[at] for at in places]
        rows = take(logits, [row for row, _, _ in chosen])
        if is_greedy:
            columns = draws.argmax(rows)
            best = _at(rows, columns)
        else:
            temperatures = torch.tensor([span.sampling.temperature for _, span, _ in chosen], dtype=torch.float64)
            keys = noise.noise_keys(
                [span.sampling.seed for _, span, _ in chosen],
                [span.sampling.choice for _, span, _ in chosen],
                [position for _, _, position in chosen],
                Purpose.COUPLED,
            )
            columns = draws.draw(rows, temperatures, keys, vocab_offset)
            # What travels to other ranks has the very bits that torch gives, whoever computed it.
            gumbel = noise.gumbel_rows(keys, (columns.clamp(min=0) + vocab_offset)[:, None])[:, 0]
            best = gumbel.add_(_at(rows, columns) / temperatures)
        values[places] = best
        tokens[places] = torch.where(columns < 0, columns, columns + vocab_offset)


def _at(rows: Tensor, columns: Tensor) -> Tensor:
    """The entries of rows [n, V] at columns [n]: [n] float64."""
    return rows.gather(1, columns.clamp(min=0)[:, None])[:, 0].to(torch.float64)
