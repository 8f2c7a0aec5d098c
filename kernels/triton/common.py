"""What the kernels share: row buckets, and the product of two tiles."""

from __future__ import annotations

import triton
import triton.language as tl

# Rows are handled in tiles of one size, the smallest that tensor cores take: a larger tile for more rows would choose
# another instruction, and with it another order of sums.
ROW_TILE = 16
ROW_BUCKETS = (16, 32, 64)

# Whether kernels run in Triton's interpreter (numpy on the CPU). It keeps bfloat16 as bare bits, which its products do
# not know; there operands are widened first. The numbers are the same, and products of them are exact in float32.
INTERPRETED: bool = triton.knobs.runtime.interpret


def row_bucket(num_rows: int) -> int:
    """The rows that a launch handles, for as many that count."""
    for bucket in ROW_BUCKETS:
        if num_rows <= bucket:
            return bucket
    raise ValueError(f"{num_rows} rows; these kernels take at most {ROW_BUCKETS[-1]}")


@triton.jit
def product(left: tl.tensor, right: tl.tensor, interpreted: tl.constexpr) -> tl.tensor:
    """left [m, k] @ right [k, n] -> [m, n] float32; float32 operands are not rounded to TF32."""
    if interpreted:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, out_dtype=tl.float32, input_precision="ieee")
