"""Drafting with a small causal language model over a paged cache of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.proposal import SparseRow
from outrider.kernels.reference.draft import draw_rows
from outrider.workers.drafters.base import Drafted, DraftRows, Draw
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.engine import Engine


class ModelDrafter:
    """One token for each session and pass, drawn from the model's own distribution.

    Under rejection that is the distribution cut to its ``top_m`` likeliest tokens, and it is returned as the row.
    """

    name = "model"

    def __init__(self, engine: Engine, *, top_m: int) -> None:
        self.engine = engine
        self.fingerprint = engine.fingerprint
        self.vocab_size = engine.vocab_size
        self.max_model_len = engine.max_model_len
        self.num_blocks = engine.num_blocks
        self.block_size = engine.block_size
        self.max_num_seqs = engine.max_num_seqs
        self._top_m = top_m

    def run(self, batch: Sequence[DraftRows]) -> list[Drafted]:
        """As in ``Drafter.run``. A row that is not finite spoils the draw of its own session only."""
        sequences = [
            SequenceRows(
                tokens=rows.tokens,
                start=rows.start,
                block_table=rows.block_table,
                logits_rows=() if rows.draw is None else (len(rows.tokens) - 1,),
            )
            for rows in batch
        ]
        draws = [rows.draw for rows in batch if rows.draw is not None]
        with torch.inference_mode():
            hidden = self.engine.forward(sequences)  # [num_draws, hidden]
            drawn = iter(draw_all(self.engine.local_logits(hidden), draws, self._top_m) if draws else ())
        return [Drafted() if rows.draw is None else next(drawn) for rows in batch]


def draw_all(logits: Tensor, draws: Sequence[Draw], top_m: int) -> list[Drafted]:
    """One token for each row of logits [n, vocab_size] float32, as ``draws`` ask."""
    groups: dict[tuple[float, int, float, str, int], list[int]] = {}
    for row, draw in enumerate(draws):
        sampling = draw.sampling
        # Rows with filters go alone: together each would be computed on all tokens that any of them keeps.
        alone = row if sampling.top_k or sampling.top_p < 1.0 else -1
        settings = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.verifier.label, alone)
        groups.setdefault(settings, []).append(row)
    results = [Drafted()] * len(draws)
    for (temperature, top_k, top_p, verifier, _), rows in groups.items():
        members = [draws[row] for row in rows]
        drawn = draw_rows(
            logits[rows],
            [draw.position for draw in members],
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seeds=[draw.sampling.seed for draw in members],
            choices=[draw.sampling.choice for draw in members],
            verifier=verifier,
            prefix_hashes=[draw.prefix_hash for draw in members],
            top_m=top_m,
        )
        for index, (row, token) in enumerate(zip(rows, drawn.tokens.tolist(), strict=True)):
            if token < 0:
                results[row] = Drafted(invalid=True)
            elif drawn.token_ids is None or drawn.probs is None:
                results[row] = Drafted(tokens=(token,))
            else:
                positive = drawn.probs[index] > 0
                ids = drawn.token_ids[index, positive].cpu().numpy()
                probs = drawn.probs[index, positive].cpu().numpy()
                results[row] = Drafted(tokens=(token,), rows=(SparseRow(ids, probs),))
    return results
