"""A decoder whose layers are all fused blocks, without what a model's own does around them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from outrider.workers.engine.attention import STEP_KEYWORD, AttentionStep
from outrider.workers.engine.fused import FusedBlock, FusedRMSNorm
from outrider.workers.engine.linear import RowParallelLinear, WideningEmbedding
from outrider.workers.engine.probe import PROBE_ROWS, PROBE_START, agree, probe_step, without_ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecoderOutput:
    last_hidden_state: Tensor  # [1, rows, hidden]


class FusedDecoder(nn.Module):
    """Embedding, blocks and a norm. On one rank the blocks are one call of our kernels: it gives the bits of each."""

    def __init__(
        self, embedding: WideningEmbedding, rotary: nn.Module, blocks: list[FusedBlock], norm: FusedRMSNorm
    ) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.rotary_emb = rotary
        self.layers = nn.ModuleList(blocks)
        self.norm = norm
        windows = {block.attention.shape.sliding_window for block in blocks} - {None}
        self._sliding_window = min(windows, default=None)  # type: ignore[type-var]
        self._layers = [block.attention.shape.layer for block in blocks]
        self._stack: Any = None
        self.blocks_changed()

    def blocks_changed(self) -> None:
        """Take the blocks as they are now."""
        if not any(isinstance(module, RowParallelLinear) for module in self.modules()):
            blocks = cast(Iterable[FusedBlock], self.layers)
            self._stack = self.norm.kernels.stack([block.native for block in blocks], self.norm.native)

    def forward(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> DecoderOutput:
        """input_ids, position_ids [1, rows]"""
        step: AttentionStep = kwargs[STEP_KEYWORD]
        hidden = self.embed_tokens(input_ids)
        rotation = self.rotary_emb(hidden, position_ids)
        if self._stack is None:
            for block in self.layers:
                hidden = block(hidden, position_embeddings=rotation, **{STEP_KEYWORD: step})
            return DecoderOutput(self.norm(hidden))
        step.check_window(self._sliding_window)
        step.layers_seen.update(self._layers)
        keys, values = ([cache[layer] for layer in self._layers] for cache in (step.keys, step.values))
        table = step.row_table
        rows = self._stack.forward(
            hidden[0], *step.rotation(rotation), keys, values, step.slot_mapping, table.slots, table.rows
        )
        return DecoderOutput(rows[None])


def fuse_decoder(decoder: nn.Module) -> nn.Module:
    """A fused one where all layers of a decoder are fused and it gives the same; else the decoder itself."""
    fused = _fused(decoder)
    if fused is None:
        return decoder
    first: FusedBlock = fused.layers[0]  # type: ignore[assignment]
    tokens, positions = torch.arange(PROBE_ROWS)[None], torch.arange(PROBE_START, PROBE_START + PROBE_ROWS)[None]

    def run(module: nn.Module) -> Tensor:
        step = probe_step(max(fused._layers), first.attention.num_kv_heads, first.attention.shape.head_dim)
        facts = {"input_ids": tokens, "position_ids": positions, "use_cache": False, STEP_KEYWORD: step}
        hidden: Tensor = module(**facts).last_hidden_state
        return torch.cat([hidden.flatten(), step.keys[0].flatten(), step.values[0].flatten()])

    products = [module for module in decoder.modules() if isinstance(module, RowParallelLinear)]
    with without_ranks(products):
        same = agree(lambda: run(decoder), lambda: run(fused))
    if not same:
        logger.warning("kept the model's own decoder (%s): ours would compute something else", type(decoder).__name__)
        return decoder
    logger.info("fused the decoder")
    return fused.train(decoder.training)


def _fused(decoder: nn.Module) -> FusedDecoder | None:
    """What a decoder would be if it did nothing but what its parts say."""
    parts = list(_parts(decoder))
    kinds = [type(part) for part in parts]
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None or sorted(kind.__name__ for kind in kinds) != ["FusedRMSNorm", "ModuleList", "WideningEmbedding"]:
        return None
    by_kind = dict(zip(kinds, parts, strict=True))
    blocks = list(by_kind[nn.ModuleList])  # type: ignore[call-overload]
    if not all(isinstance(block, FusedBlock) for block in blocks):
        return None
    return FusedDecoder(by_kind[WideningEmbedding], rotary, blocks, by_kind[FusedRMSNorm])  # type: ignore[arg-type]


def _parts(decoder: nn.Module) -> Iterator[nn.Module]:
    return (child for name, child in decoder.named_children() if name != "rotary_emb")
