"""The maths of speculative decoding in plain torch: the oracle that fast twins are compared with.

- ``distribution``: one row of logits and a request's settings to the distribution that is sampled, step by step.
- ``chain``: the verification of one chain, in plain loops.

Building blocks, for rows that share temperature, top-k and top-p:

- ``noise``: keyed random numbers.
- ``transforms``: temperature, top-k and top-p; supports.
- ``rejection``: ratio, residual, and the decision about one proposal in each of n rows.
- ``sampling``: Gumbel-argmax.
- ``draft``: what a draft proposes, and the row that it sends.
- ``verify``: which proposals are kept, and the token that follows.

Free functions of arrays and keys; nothing here keeps state, waits, or draws from a hidden generator. Every function's
result for a row depends on that row alone.
"""

from outrider.kernels.reference.errors import InvalidLogitsError

__all__ = ["InvalidLogitsError"]
