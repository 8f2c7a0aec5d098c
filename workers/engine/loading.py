"""From a folder in Hugging Face format to a sharded model whose attention and linear layers are ours."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.cluster.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.workers.engine import shm
from outrider.workers.engine.activations import replace_activations
from outrider.workers.engine.attention import IMPLEMENTATION, register_attention
from outrider.workers.engine.fused_decoder import fuse_decoder
from outrider.workers.engine.fusing import fuse_layers
from outrider.workers.engine.linear import VocabParallelHead, WideningEmbedding, replace_linear
from outrider.workers.engine.parallel import Parallel
from outrider.workers.engine.products import WeightFormat, choose_format
from outrider.workers.engine.rounding import round_rows

logger = logging.getLogger(__name__)

# Rotary embeddings whose frequencies depend on the longest position in the batch.
VARYING_ROPE = frozenset({"dynamic", "longrope"})
# What a model's own head would do beyond a product, and attention that ours does not have.
UNSUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "kv_lora_rank": (None,),
    "quantization_config": (None,),
    "is_encoder_decoder": (None, False),
}


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that cache and scheduler need; heads are those of the whole model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    num_embeddings: int
    max_positions: int


@dataclass(frozen=True)
class LoadedModel:
    """A rank's shard: the decoder, which gives hidden states, and the head."""

    decoder: nn.Module
    head: VocabParallelHead
    weight_format: WeightFormat


def read_model_config(config: EngineConfig, tensor_parallel_size: int) -> ModelShape:
    """What the model's own configuration says, checked. Raises ``ConfigError`` naming the setting and its limit."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    folder = Path(config.model)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model: {folder} has no config.json; it must be a folder in Hugging Face format")
    try:
        hf = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"model: {folder}: {' '.join(str(error).split())[:300]}") from error
    architectures = hf.architectures or []
    if type(hf) not in MODEL_FOR_CAUSAL_LM_MAPPING or not any("CausalLM" in name for name in architectures):
        raise ConfigError(f"model: {folder} is {architectures or hf.model_type}, not a causal language model")
    for name, allowed in UNSUPPORTED_VALUES.items():
        if getattr(hf, name, None) not in allowed:
            raise ConfigError(f"model: {folder} sets {name}, which the engine does not implement")
    rope = getattr(hf, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if part.get("rope_type") in VARYING_ROPE:
            raise ConfigError(f"model: {folder} has rope_type {part['rope_type']}, whose rows depend on each other")
    shape = _shape(hf)
    for field, heads in (("attention heads", shape.num_heads), ("key/value heads", shape.num_kv_heads)):
        if heads % tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size is {tensor_parallel_size}, but must divide the {heads} {field} of {folder}"
            )
    if config.max_model_len is not None and config.max_model_len > shape.max_positions:
        raise ConfigError(f"max_model_len is {config.max_model_len}, but {folder} has {shape.max_positions} positions")
    return shape


def _shape(hf: Any) -> ModelShape:
    heads = int(hf.num_attention_heads)
    return ModelShape(
        num_layers=int(hf.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=int(getattr(hf, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(hf, "head_dim", None) or hf.hidden_size // heads),
        hidden_size=int(hf.hidden_size),
        num_embeddings=int(hf.vocab_size),
        max_positions=int(hf.max_position_embeddings),
    )


def load_model(config: EngineConfig, vocab_size: int, parallel: Parallel, device: torch.device) -> LoadedModel:
    """Read, shard and pack. Whole weights live in the checkpoint's own type, and only until they are cut."""
    from transformers import AutoModelForCausalLM

    register_attention()
    weight_format = choose_format(config, device)
    began = time.monotonic()
    logger.info("rank %d reads %s", parallel.rank, config.model)
    try:
        with shm.quiet(), _no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(
                config.model, dtype="auto", attn_implementation=IMPLEMENTATION, local_files_only=True
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model: {config.model}: {' '.join(str(error).split())[:300]}") from error
    model.eval().requires_grad_(False)
    decoder: nn.Module = model.base_model
    output = model.get_output_embeddings()
    weight, bias = output.weight.data, None if output.bias is None else output.bias.data
    del model, output
    if parallel.world_size > 1:
        _shard(decoder, parallel, next(decoder.parameters()).dtype)
    if weight_format.kernels is not None:
        logger.info("rank %d multiplies on %s", parallel.rank, weight_format.kernels.instruction_set)
        fuse_layers(decoder, weight_format, weight_format.kernels, parallel)
    _replace_layers(decoder, parallel, weight_format, device)
    if device.type == "cpu":
        replace_activations(decoder)
        decoder = fuse_decoder(decoder)
    head = VocabParallelHead(
        weight.to(device), None if bias is None else bias.to(device), vocab_size, parallel, weight_format
    )
    del weight, bias
    if config.activation_dtype == "bfloat16":
        round_rows(decoder)
        round_rows(head)
    gc.collect()
    logger.info("rank %d is loaded after %.1f s", parallel.rank, time.monotonic() - began)
    return LoadedModel(decoder, head, weight_format)


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Progress goes to the log, as lines."""
    from transformers.utils import logging as transformers_logging

    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def _shard(decoder: nn.Module, parallel: Parallel, dtype: torch.dtype) -> None:
    """Cut the decoder's layers with DeepSpeed AutoTP, in place. The embedding stays whole on each rank."""
    import deepspeed

    buffers = [(module, name, value) for module in decoder.modules() for name, value in module._buffers.items()]
    with shm.quiet():
        deepspeed.init_inference(
            decoder,
            tensor_parallel={"tp_size": parallel.world_size},
            dtype=dtype,
            replace_with_kernel_inject=False,
        )
    for module, name, value in buffers:
        module._buffers[name] = value  # DeepSpeed rounds them too, but rotary frequencies must stay float32


def _replace_layers(decoder: nn.Module, parallel: Parallel, weight_format: WeightFormat, device: torch.device) -> None:
    """Put our linear layers and embedding in place of torch's and DeepSpeed's; convert what is left."""
    parents = [
        (parent, name, child)
        for parent in decoder.modules()
        for name, child in parent.named_children()
        if isinstance(getattr(child, "weight", None), Tensor)
    ]
    for number, (parent, name, child) in enumerate(parents):
        replacement = _replacement(child, parallel, weight_format, device)
        if replacement is not None:
            setattr(parent, name, replacement)
            child._parameters.clear()  # the whole weight goes now, not when all layers are done
        if number * 4 // len(parents) != (number + 1) * 4 // len(parents):
            logger.info("rank %d packed %d of %d layers", parallel.rank, number + 1, len(parents))
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(device=device, dtype=weight_format.activations)
    for module in decoder.modules():
        for name, value in module._buffers.items():
            module._buffers[name] = None if value is None else value.to(device)


def _replacement(
    layer: nn.Module, parallel: Parallel, weight_format: WeightFormat, device: torch.device
) -> nn.Module | None:
    if type(layer) is nn.Embedding:
        return WideningEmbedding(layer.weight.data.to(device), weight_format.activations)
    if type(layer) is not nn.Linear and not type(layer).__module__.startswith("deepspeed."):
        return None
    return replace_linear(layer, parallel, weight_format, device)
