"""The maths of speculative decoding in plain torch: the oracle that fast twins are compared with.

- ``noise``: keyed random numbers.
- ``transforms``: logits to the distribution that is sampled.
- ``sampling``: Gumbel-argmax.
- ``draft``: what a draft proposes, and the row that it sends.
- ``verify``: which proposals are kept, and the token that follows.

Free functions of arrays and keys; nothing here keeps state, waits, or draws from a hidden generator. Every function's
result for a row depends on that row alone.
"""

from outrider.kernels.reference.errors import InvalidLogitsError

__all__ = ["InvalidLogitsError"]
