"""Keyed random numbers: a pure function of what is being drawn, never of a stream.

A number is named by (seed, choice, position, purpose, token id), and for a draft's own draws under rejection also by
the prefix. The first four, and the prefix, make a 128-bit *key* (BLAKE2b); the key and the token id are mixed by two
rounds of the SplitMix64 finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

So a number does not depend on the width of the vocabulary, the batch, the number of proposals, the number of draws
made before, or which other tokens are asked for; two processes that never met agree on it; and drawing again after a
crash or a rollback gives the same number. ``position`` is absolute in prompt + output: keyed by the output index, a
second turn with the same seed would meet the noise that wrote its own prompt.

Uniforms have 52 random bits and lie strictly between 0 and 1: the smallest is 2^-53, the largest 1 - 2^-53, both
exact in float64. Fewer bits bend large vocabularies: with 24 bits each token has a chance of 2^-24 of the largest
uniform, which beats any logit, so that among 151,936 tokens an arbitrary one wins 0.9 % of the draws.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

_MASK_64 = (1 << 64) - 1


def _signed(value: int) -> int:
    """The int64 with the same 64 bits: torch has no unsigned 64-bit arithmetic, and multiplication wraps alike."""
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_A = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_B = _signed(0x94D049BB133111EB)

# Tokens that are worked on at once: some twenty passes over them stay in a core's cache.
_BLOCK = 1 << 15


class Purpose(enum.IntEnum):
    """What a number is for. Numbers of different purposes are independent. The values are part of the key: never reuse
    one."""

    TARGET = 1  # a draw from p under rejection: a bonus token, or plain decoding
    ACCEPT = 2  # the uniform that decides about a proposal
    RESIDUAL = 3  # the draw that replaces a rejected proposal
    COUPLED = 4  # every draw under coupled verification: draft and target share it
    DRAFT = 5  # a draft's own draw under rejection; also keyed by the prefix


def noise_key(seed: int, choice: int, position: int, purpose: Purpose, prefix_hash: int = 0) -> tuple[int, int]:
    """The key of the draw of one token, as two unsigned 64-bit integers.

    Args:
        seed: 64 bits, of the request.
        choice: index among the choices of one request, 32 bits.
        position: absolute position, in prompt + output, of the token being drawn.
        purpose: what the numbers are for.
        prefix_hash: hash of the tokens before ``position``; only for ``Purpose.DRAFT``.

    Raises:
        ValueError: a negative or too large argument.
    """
    try:
        message = struct.pack("<QIQBQ", seed, choice, position, purpose, prefix_hash)
    except struct.error as error:
        raise ValueError(
            f"noise key (seed {seed}, choice {choice}, position {position}, prefix hash {prefix_hash}): {error}"
        ) from error
    first, second = struct.unpack("<QQ", hashlib.blake2b(message, digest_size=16).digest())
    return first, second


def noise_keys(
    seeds: Sequence[int],
    choices: Sequence[int],
    positions: Sequence[int],
    purpose: Purpose,
    prefix_hashes: Sequence[int] | None = None,
) -> Tensor:
    """``noise_key`` for each of n rows: [n, 2] int64 (the keys' bits), on the CPU."""
    hashes = [0] * len(seeds) if prefix_hashes is None else prefix_hashes
    keys = [
        noise_key(seed, choice, position, purpose, prefix_hash)
        for seed, choice, position, prefix_hash in zip(seeds, choices, positions, hashes, strict=True)
    ]
    return key_tensor(keys)


def key_tensor(keys: Sequence[tuple[int, int]]) -> Tensor:
    """Keys as a tensor: [n, 2] int64, of the same bits."""
    return torch.tensor([(_signed(first), _signed(second)) for first, second in keys], dtype=torch.int64).view(-1, 2)


def uniform_rows(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Uniforms in the open interval (0, 1), one for each key and token.

    Args:
        keys: [n, 2] int64, from ``noise_keys``.
        token_ids: [s] (the same tokens in each row) or [n, s] int64.

    Returns:
        [n, s] float64: (top 52 bits + 1/2) * 2^-52 of the mixed key and token id.
    """
    keys = keys.to(token_ids.device)
    bits = token_ids * _GOLDEN + keys[:, :1]  # [n, s]
    scratch = torch.empty_like(bits)
    _mix(bits, scratch)
    bits += keys[:, 1:]
    _mix(bits, scratch)
    _logical_shift(bits, 12, scratch)
    # The result takes the memory of the bits, which are done with: touching fresh pages costs more than the arithmetic.
    return bits.view(torch.float64).copy_(scratch).add_(0.5).mul_(2.0**-52)


def gumbel_rows(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise -log(-log u), shapes as ``uniform_rows``; between -3.61 and 36.74."""
    shape = (len(keys), token_ids.shape[-1])
    noise = torch.empty(shape, dtype=torch.float64, device=token_ids.device)
    for start in range(0, shape[1], _BLOCK):
        block = slice(start, start + _BLOCK)
        noise[:, block] = uniform_rows(keys, token_ids[..., block]).log_().neg_().log_().neg_()
    return noise


def uniforms(key: tuple[int, int], token_ids: Tensor) -> Tensor:
    """Uniforms of one key: [s] int64 token ids → [s] float64 in the open interval (0, 1)."""
    return uniform_rows(key_tensor([key]), token_ids)[0]


def gumbel(key: tuple[int, int], token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise of one key: [s] int64 token ids → [s] float64."""
    return gumbel_rows(key_tensor([key]), token_ids)[0]


def uniform(key: tuple[int, int], token_id: int) -> float:
    """The uniform of one key and token."""
    return float(uniforms(key, torch.tensor([token_id]))[0])


def _mix(bits: Tensor, scratch: Tensor) -> None:
    """SplitMix64's finaliser on 64-bit words, in place: a bijection in which each output bit depends on every input
    bit."""
    _logical_shift(bits, 30, scratch)
    bits.bitwise_xor_(scratch).mul_(_MULTIPLIER_A)
    _logical_shift(bits, 27, scratch)
    bits.bitwise_xor_(scratch).mul_(_MULTIPLIER_B)
    _logical_shift(bits, 31, scratch)
    bits.bitwise_xor_(scratch)


def _logical_shift(bits: Tensor, count: int, out: Tensor) -> None:
    """out = bits >> count with zeros coming in; torch's shift of signed integers brings the sign in."""
    torch.bitwise_right_shift(bits, count, out=out)
    out.bitwise_and_((1 << (64 - count)) - 1)
