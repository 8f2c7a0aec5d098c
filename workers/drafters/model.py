"""Drafting with a small causal language model over a paged cache of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.proposal import SparseRow
from outrider.kernels.batched.data import Ask
from outrider.kernels.batched.draft import draw as draw_rows
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
    """One token for each row of logits [n, vocab_size] float32, as ``draws`` ask, each with settings of its own."""
    asks = [
        Ask(
            sampling=draw.sampling,
            position=draw.position,
            prefix_hash=draw.prefix_hash,
            text=draw.text,
            allowed=None if draw.allowed is None else torch.from_numpy(draw.allowed).to(logits.device),
        )
        for draw in draws
    ]
    results: list[Drafted] = []
    for drawn in draw_rows(logits, asks, top_m=top_m):
        if drawn is None:
            results.append(Drafted(invalid=True))
        elif drawn.token_ids is None or drawn.probs is None:
            results.append(Drafted(tokens=(drawn.token,)))
        else:
            row = SparseRow(drawn.token_ids.cpu().numpy(), drawn.probs.cpu().numpy())
            results.append(Drafted(tokens=(drawn.token,), rows=(row,)))
    return results
