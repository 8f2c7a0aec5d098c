"""Finds the layers of a model that ours can replace, by what they are made of, and proves it before it replaces them.

Nothing here knows a model by its name. A candidate has the right children and attributes; then it and its replacement
compute the same made-up rows, and the candidate stays where they differ by more than rounding. For that test the large
products are taken out and cheap linear maps put in their places, in both alike: what is left is what differs between
models (the activation, the kind of rotation, norms of heads, grouping, scale). Blocks, whose parts are in place
already, are compared with their products.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outrider.kernels.cpu import HeadsShape, Kernels
from outrider.workers.engine.attention import STEP_KEYWORD
from outrider.workers.engine.fused import AttentionShape, FusedAttention, FusedBlock, FusedRMSNorm, FusedSwiGLU
from outrider.workers.engine.linear import (
    ROW_PARALLEL,
    WHOLE_OR_COLUMN_PARALLEL,
    PackedLinear,
    replace_linear,
)
from outrider.workers.engine.parallel import Parallel
from outrider.workers.engine.probe import PROBE_ROWS, PROBE_START, agree, probe_step, without_ranks
from outrider.workers.engine.probe import generator as probe_generator
from outrider.workers.engine.products import WeightFormat

logger = logging.getLogger(__name__)

HEAD_MULTIPLE = 16  # of the elements of a head, which the attention kernel takes in whole vectors

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


class LinearMap(nn.Module):
    """A cheap linear map in the place of a product: each output is one of the inputs, times a number."""

    def __init__(self, index: Tensor, factor: Tensor) -> None:
        super().__init__()
        self.index = index  # [out_features] int64
        self.factor = factor  # [out_features]

    @classmethod
    def like(cls, layer: nn.Module, generator: torch.Generator) -> LinearMap:
        """As large as a linear layer."""
        out_features, in_features = _weight(layer).shape
        return cls.sized(out_features, in_features, generator)

    @classmethod
    def sized(cls, out_features: int, in_features: int, generator: torch.Generator) -> LinearMap:
        index = torch.randint(in_features, (out_features,), generator=generator)
        return cls(index, torch.randn(out_features, generator=generator))

    @classmethod
    def joined(cls, maps: list[LinearMap]) -> LinearMap:
        """The outputs of several, one after the other."""
        return cls(torch.cat([one.index for one in maps]), torch.cat([one.factor for one in maps]))

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.index] * self.factor


def fuse_layers(decoder: nn.Module, weight_format: WeightFormat, kernels: Kernels, parallel: Parallel) -> None:
    """Put fused layers in place of the model's own wherever they give the same, in place."""
    rotary = getattr(decoder, "rotary_emb", None)
    done: collections.Counter[str] = collections.Counter()
    kept: collections.Counter[str] = collections.Counter()
    fusers: dict[str, Callable[[nn.Module], nn.Module | None]] = {
        "attention layers": lambda layer: _fuse_attention(layer, rotary, weight_format, kernels, parallel),
        "MLPs": lambda layer: _fuse_swiglu(layer, weight_format, kernels, parallel),
        "norms": lambda layer: _fuse_norm(layer, kernels),
        "blocks": lambda layer: _fuse_block(layer, rotary),  # of what the others have put in place
    }
    looks_right = {
        "attention layers": _is_attention,
        "MLPs": _is_gated_mlp,
        "norms": _is_rms_norm,
        "blocks": _is_block,
    }
    for kind, fuse in fusers.items():
        for parent in list(decoder.modules()):
            for name, child in list(parent.named_children()):
                if not looks_right[kind](child):
                    continue
                fused = fuse(child)
                if fused is None:
                    kept[f"{kind} ({type(child).__name__})"] += 1
                    continue
                done[kind] += 1
                setattr(parent, name, fused)
                for part in child.modules():
                    part._parameters.clear()  # whole weights go now, not when all layers are done
    logger.info("fused %s", ", ".join(f"{count} {kind}" for kind, count in done.items()) or "nothing")
    for what, count in kept.items():
        logger.warning("kept the model's own %d %s: ours would compute something else", count, what)


def _weight(layer: nn.Module) -> Tensor:
    return dict(layer.named_parameters(recurse=False))["weight"].data


def _is_linear(layer: nn.Module | None, kinds: tuple[str, ...]) -> bool:
    known = type(layer) is nn.Linear or type(layer).__module__.startswith("deepspeed.")
    return known and type(layer).__name__ in kinds


def _is_rms_norm(layer: nn.Module) -> bool:
    own = dict(layer.named_parameters())
    return (
        set(own) == {"weight"} and own["weight"].dim() == 1 and _eps(layer) is not None and not list(layer.children())
    )


def _eps(layer: nn.Module) -> float | None:
    found = getattr(layer, "variance_epsilon", getattr(layer, "eps", None))
    return found if isinstance(found, float) else None


def _is_gated_mlp(layer: nn.Module) -> bool:
    children = dict(layer.named_children())
    return all(_is_linear(children.get(name), WHOLE_OR_COLUMN_PARALLEL) for name in GATE_UP) and _is_linear(
        children.get("down_proj"), (*WHOLE_OR_COLUMN_PARALLEL, ROW_PARALLEL)
    )


def _is_attention(layer: nn.Module) -> bool:
    children = dict(layer.named_children())
    return (
        all(_is_linear(children.get(name), WHOLE_OR_COLUMN_PARALLEL) for name in QKV)
        and _is_linear(children.get("o_proj"), (*WHOLE_OR_COLUMN_PARALLEL, ROW_PARALLEL))
        and isinstance(getattr(layer, "layer_idx", None), int)
        and isinstance(getattr(layer, "head_dim", None), int)
    )


def _is_block(layer: nn.Module) -> bool:
    kinds = collections.Counter(type(child) for child in layer.children())
    return kinds == {FusedRMSNorm: 2, FusedAttention: 1, FusedSwiGLU: 1} and not layer._parameters


def _fuse_norm(layer: nn.Module, kernels: Kernels) -> nn.Module | None:
    weight, eps = _weight(layer), _eps(layer)
    if eps is None:
        return None
    fused = FusedRMSNorm(weight, eps, kernels)
    x = torch.randn(PROBE_ROWS, len(weight), generator=probe_generator())
    return fused if agree(lambda: layer(x), lambda: fused(x)) else None


def _fuse_swiglu(
    layer: nn.Module, weight_format: WeightFormat, kernels: Kernels, parallel: Parallel
) -> nn.Module | None:
    parts = dict(layer.named_children())
    generator = probe_generator()
    maps = {name: LinearMap.like(parts[name], generator) for name in (*GATE_UP, "down_proj")}
    x = torch.randn(PROBE_ROWS, _weight(parts["gate_proj"]).shape[1], generator=generator)
    trial = FusedSwiGLU(LinearMap.joined([maps[name] for name in GATE_UP]), maps["down_proj"], kernels)
    with _swapped(layer, maps):
        if not agree(lambda: layer(x), lambda: trial(x)):
            return None
    gate_up = _joined([parts[name] for name in GATE_UP], weight_format)
    down = replace_linear(parts["down_proj"], parallel, weight_format, torch.device("cpu"))
    return FusedSwiGLU(gate_up, down, kernels)


def _fuse_attention(
    layer: nn.Module, rotary: nn.Module | None, weight_format: WeightFormat, kernels: Kernels, parallel: Parallel
) -> nn.Module | None:
    shape = _attention_shape(layer)
    if shape is None or rotary is None:
        return None
    parts = dict(layer.named_children())
    generator = probe_generator()
    maps = {name: LinearMap.like(parts[name], generator) for name in (*QKV, "o_proj")}
    kv_heads = len(maps["k_proj"].index) // shape.head_dim
    hidden = torch.randn(1, PROBE_ROWS, _weight(parts["q_proj"]).shape[1], generator=generator)
    positions = torch.arange(PROBE_START, PROBE_START + PROBE_ROWS)[None]
    trial = FusedAttention(shape, LinearMap.joined([maps[name] for name in QKV]), maps["o_proj"], kernels)

    windows: set[int] = set()  # some models read theirs from the configuration, others from an attribute

    def run(module: nn.Module) -> Tensor:
        """Output, keys and values, as one row of numbers."""
        step = probe_step(shape.layer, kv_heads, shape.head_dim)
        step.windows_seen = windows
        facts: dict[str, Any] = {"position_embeddings": rotary(hidden, positions), "attention_mask": None}
        out = module(hidden_states=hidden, **facts, **{STEP_KEYWORD: step})[0]
        return torch.cat([out.flatten(), step.keys[shape.layer].flatten(), step.values[shape.layer].flatten()])

    with _swapped(layer, maps):
        if not agree(lambda: run(layer), lambda: run(trial)):
            return None
    qkv = _joined([parts[name] for name in QKV], weight_format)
    output = replace_linear(parts["o_proj"], parallel, weight_format, torch.device("cpu"))
    return FusedAttention(dataclasses.replace(shape, sliding_window=min(windows, default=None)), qkv, output, kernels)


def _fuse_block(layer: nn.Module, rotary: nn.Module | None) -> nn.Module | None:
    children = list(layer.children())
    first, second = (child for child in children if isinstance(child, FusedRMSNorm))
    (attention,) = (child for child in children if isinstance(child, FusedAttention))
    (mlp,) = (child for child in children if isinstance(child, FusedSwiGLU))
    shape, products = attention.shape, (attention.qkv, attention.output, mlp.gate_up, mlp.down)
    if rotary is None or any(not isinstance(product, PackedLinear) or product.affine is None for product in products):
        return None
    kv_heads, hidden_size = attention.num_kv_heads, len(first.weight)
    hidden = torch.randn(1, PROBE_ROWS, hidden_size, generator=probe_generator())
    positions = torch.arange(PROBE_START, PROBE_START + PROBE_ROWS)[None]

    def run(module: nn.Module) -> Tensor:
        step = probe_step(shape.layer, kv_heads, shape.head_dim)
        facts: dict[str, Any] = {"position_embeddings": rotary(hidden, positions), "attention_mask": None}
        out = module(hidden, **facts, **{STEP_KEYWORD: step})
        if not isinstance(out, Tensor):
            raise TypeError("the layer returns more than its rows")
        return out

    for attention_norm, mlp_norm in ((first, second), (second, first)):
        block = FusedBlock(attention_norm, attention, mlp_norm, mlp)
        with without_ranks(products):
            same = agree(functools.partial(run, layer), functools.partial(run, block))
        if same:
            # Models look at such facts of their layers, say at the kind of attention.
            for name, value in vars(layer).items():
                if isinstance(value, (int, float, str)) and not name.startswith("_"):
                    setattr(block, name, value)
            return block.train(layer.training)
    return None


def _attention_shape(layer: nn.Module) -> AttentionShape | None:
    """What the attributes of an attention layer say; None where ours cannot be like that."""
    head_dim, layer_idx = layer.head_dim, layer.layer_idx
    scale, children = getattr(layer, "scaling", None), dict(layer.named_children())
    if not isinstance(head_dim, int) or not isinstance(layer_idx, int) or not isinstance(scale, float):
        return None
    q_norm, k_norm = children.get("q_norm"), children.get("k_norm")
    norms: dict[str, Any] = {}
    if q_norm is not None and k_norm is not None:
        if not (_is_rms_norm(q_norm) and _is_rms_norm(k_norm) and _eps(q_norm) == _eps(k_norm)):
            return None
        if not len(_weight(q_norm)) == len(_weight(k_norm)) == head_dim:
            return None
        weights = [_weight(norm).float().contiguous() for norm in (q_norm, k_norm)]
        norms = {"q_norm": weights[0], "k_norm": weights[1], "eps": _eps(q_norm)}
    heads, rest = divmod(len(_weight(children["q_proj"])), head_dim)
    if rest or head_dim % HEAD_MULTIPLE:
        return None
    return AttentionShape(layer_idx, head_dim, HeadsShape(heads, scale, **norms))


def _joined(layers: list[nn.Module], weight_format: WeightFormat) -> PackedLinear:
    """Linear layers with the same inputs as one, their outputs one after the other."""
    own = [dict(layer.named_parameters(recurse=False)) for layer in layers]
    weight = torch.cat([_weight(layer) for layer in layers])
    if not any("bias" in parameters for parameters in own):
        return PackedLinear(weight, None, weight_format)
    biases = [
        parameters["bias"].data if "bias" in parameters else weight.new_zeros(len(_weight(layer)))
        for layer, parameters in zip(layers, own, strict=True)
    ]
    return PackedLinear(weight, torch.cat(biases), weight_format)


@contextlib.contextmanager
def _swapped(layer: nn.Module, children: Mapping[str, nn.Module]) -> Iterator[None]:
    before = {name: layer._modules[name] for name in children}
    layer._modules.update(children)
    try:
        yield
    finally:
        layer._modules.update(before)
