"""The maths of a whole step at once: rows of many sequences, each with settings of its own, on CPU or CUDA.

- ``verify.verify``: chains to outcomes, with log-probabilities.
- ``draft.draw``: what a draft proposes.
- ``logprobs.score``: the log-probabilities of given tokens, as of a prompt.
- ``best``: a rank's part of an argmax over all ranks.
- ``wide``: long rows on a CPU, whose passes over the vocabulary are compiled.
- ``rows``: masks, controls and filters for rows of mixed settings.

Same definitions as ``kernels.reference``, which is written to be read and is what these are tested against. Everything
here works on rows side by side, and a row's outcome depends on that row alone. What a device does behind the filters is
``reference.sampling.draw`` and ``reference.rejection.decide``: plain arrays in, plain arrays out, so that a fused
kernel can take their place.
"""
