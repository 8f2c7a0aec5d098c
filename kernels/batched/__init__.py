"""The maths of a whole step at once: rows of many sequences, each with settings of its own, on CPU or CUDA.

Same definitions as ``kernels.reference``, which is written to be read and is what these are tested against. Everything
here works on rows side by side, and a row's outcome depends on that row alone.
"""
