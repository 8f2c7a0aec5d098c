"""What a way of drafting looks like to the draft worker: batches of session rows in, drawn tokens out.

The worker keeps the sessions, the blocks and the schedule; a drafter holds a model and its cache and keeps no state of
its own about a session. So everything that it computes is a function of the tokens before the drawn one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.core.proposal import SparseRow
from outrider.core.sampling import Sampling


@dataclass(frozen=True)
class Draw:
    """Asks for the token that follows a session's last row.

    Attributes:
        position: of the token to draw, in prompt + output.
        prefix_hash: of all tokens before it.
        text: those tokens, the drafted ones among them, or more; valid while the step runs.
        allowed: [vocab_size] bool, what the grammar allows; None for no grammar, or one that the draft cannot follow
            here. That costs acceptance only: the target masks its own rows.
    """

    sampling: Sampling
    position: int
    prefix_hash: int
    text: Sequence[int] = ()
    allowed: np.ndarray | None = None


@dataclass(frozen=True)
class DraftRows:
    """Rows of one session in a step. ``block_table`` covers ``start + len(tokens)`` positions.

    Keys and values below ``start`` are in place; those of the rows are written, whatever lay there before.
    """

    tokens: Sequence[int]  # at positions start, start + 1, ...
    start: int
    block_table: Sequence[int]
    draw: Draw | None = None  # None: only catch up


@dataclass(frozen=True)
class Drafted:
    """What a step drew for one session.

    Attributes:
        tokens: continue the session's text; empty where no draw was asked for or the row was invalid. Drafters that
            propose several tokens in one pass return them all.
        rows: the distribution that each token was drawn from; empty unless the verifier needs them.
        invalid: the draft's own row held NaN or no finite value, so nothing could be drawn.
    """

    tokens: tuple[int, ...] = ()
    rows: tuple[SparseRow, ...] = ()
    invalid: bool = False


class Drafter(Protocol):
    """A way of proposing. Attributes are fixed once it is built."""

    @property
    def name(self) -> str:
        """As in ``Proposal.drafter``."""

    @property
    def fingerprint(self) -> str:
        """Of the tokenizer; the target must have the same."""

    @property
    def vocab_size(self) -> int:
        """Tokens that may be drawn."""

    @property
    def max_model_len(self) -> int:
        """Positions of the longest sequence."""

    @property
    def num_blocks(self) -> int:
        """KV blocks that the cache holds."""

    @property
    def block_size(self) -> int:
        """Positions in a block."""

    @property
    def max_num_seqs(self) -> int:
        """Sessions in one step."""

    def run(self, batch: Sequence[DraftRows]) -> list[Drafted]:
        """One forward pass over the rows of all sessions; one result for each, in order.

        A session's result does not depend on the others in the batch (where the drafter's kernels are row-invariant).
        """
