"""Compiles the kernels for a GPU that is not there, through the calls that would launch them: every variant down to
machine code, by Triton's own compiler and the assembler that comes with it. Run as a script: compiling.py CAPABILITY.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from outrider.kernels.cpu import quantize_int8
from outrider.kernels.triton import attention, linear, rejection, verify
from outrider.kernels.triton.buffers import AttentionBuffers, VerifyBuffers


class AbsentDevice:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return self._target


def collect(capability: int) -> list[Any]:
    """Makes launches compile instead; what they compile is appended to the list."""
    triton.runtime.driver.set_active(AbsentDevice(capability))
    run, found = JITFunction.run, []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del grid, warmup
        found.append(run(self, *args, grid=None, warmup=True, **kwargs))
        return found[-1]

    JITFunction.run = compile_only
    return found


def products() -> None:
    for weight in (
        linear.LinearWeights(torch.zeros(96, 1536, dtype=torch.bfloat16)),
        linear.LinearWeights(torch.zeros(20000, 64, dtype=torch.float16)),
        *(
            linear.LinearWeights(rounded.values, rounded.scales, rounded.group_size)
            for rounded in (quantize_int8(torch.ones(96, 1536)), quantize_int8(torch.ones(96, 1536), 64))
        ),
    ):
        own = torch.bfloat16 if weight.scales is not None else weight.values.dtype
        for dtype in (own, torch.float32) if weight.scales is None else (own,):
            bias = torch.zeros(len(weight.values)) if dtype is own else None
            linear.linear(linear.allocate(weight, dtype), 5, weight, bias)


def contexts() -> None:
    for heads, kv_heads, dim, dtype, cache in (
        (12, 2, 128, torch.bfloat16, torch.bfloat16),
        (14, 2, 64, torch.float32, torch.bfloat16),
        (7, 1, 80, torch.float16, torch.float16),
    ):
        buffers = AttentionBuffers.allocate(heads, dim, 1024, 1024, dtype, "cpu")
        keys = torch.zeros(64, kv_heads, dim, dtype=cache)
        attention.attention(buffers, 5, 1000, keys, keys, 0.1)


def judgements() -> None:
    buffers, logits = VerifyBuffers.allocate(8, 151_936, 64, "cpu"), torch.zeros(8, 151_936)
    ids = torch.arange(1024).expand(8, 1024)
    verify.greedy(buffers, logits)
    verify.draw(buffers, logits)
    verify.draw(buffers, logits[:, :1024].double(), ids)
    rejection.decide(buffers, logits)
    rejection.decide(buffers, logits[:, :1024].double(), ids)
    verify.commit(buffers, 4, 8)


if __name__ == "__main__":
    compiled = collect(int(sys.argv[1]))
    products()
    contexts()
    judgements()
    for kernel in {kernel.hash: kernel for kernel in compiled}.values():
        code = kernel.asm["ptx"]
        assert len(kernel.asm["cubin"]) > 0
        matrix = sum(line.lstrip().startswith(("mma", "wgmma")) for line in code.splitlines())
        print(kernel.metadata.name, f"shared {kernel.metadata.shared}", f"matrix instructions {matrix}")
