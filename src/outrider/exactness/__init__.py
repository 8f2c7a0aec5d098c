"""Does a running server write what its target model says? The harness behind ``outrider check-exactness``.

The server is judged from outside: texts are drawn from it (``sampler``), and every token is compared with the
distribution that transformers gives for its prefix (``oracle``), by tests whose false alarms and whose power are
numbers (``family``, ``power``). Nothing here imports the kernels, the controls, the workers or the router: what is
judged takes no part in the judgement. docs/exactness.md explains the statistics.

Vocabulary:
    row: the oracle's distribution of one token, given the text before it.
    u: the probability integral transform of a token: the mass of the tokens that an order puts before it, plus a
        uniform share of its own. Under exactness the u of all tokens are independent and uniform, whatever the rows.
    order: a ranking of a row's tokens that depends on the row and its prefix alone, never on what was drawn.
    cells: a partition of a row's tokens, with the same condition; the oracle says how much mass each has.
"""
