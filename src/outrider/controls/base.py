"""What a sampling control is. Each lives in a module of its own in this package (docs/sampling.md: how to add one).

A control is declared without torch, so that the router and the client know it too; its maths uses the methods of the
tensors that it is given. Values come in two forms. The *given* one is what a user writes (words, say). ``resolve``
turns it once, at the door, into the *resolved* one that target and draft apply: JSON, with tuples for lists.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from outrider.core.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor


class Stage(enum.IntEnum):
    """When a control applies.

    LOGITS controls change logits before the temperature, at temperature 0 too. WARP controls cut the distribution after
    it, and at temperature 0 there is nothing to cut: the most likely token stays. (In transformers these are the
    logits processors and the warpers.)
    """

    LOGITS = 1
    WARP = 2


@dataclass(frozen=True)
class Facts:
    """What resolving may look at.

    Attributes:
        vocab_size: tokens that may be sampled.
        end_token_ids: tokens that end the text of this request.
        encode: a text's tokens, without special ones added.
    """

    vocab_size: int
    end_token_ids: frozenset[int]
    encode: Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class RowText:
    """The tokens before one row: ``tokens[:length]``, of which the first ``prompt_len`` are the prompt.

    Rows of one sequence share ``tokens``: those behind ``length`` belong to other rows. A proposal's tokens count for
    the rows behind them, once each.
    """

    tokens: Sequence[int]
    length: int
    prompt_len: int

    @property
    def output_len(self) -> int:
        """Output tokens before the row."""
        return max(0, self.length - self.prompt_len)

    def seen(self) -> Sequence[int]:
        """All tokens before the row."""
        return self.tokens[: self.length]

    def output(self) -> Sequence[int]:
        """The output tokens before the row."""
        return self.tokens[self.prompt_len : self.length]


class Control(ABC):
    """One sampling control.

    Attributes:
        name: on the wire, in the client and, with dashes, on the command line.
        stage: when it applies.
        order: place among the controls of its stage, ascending.
        help: one line for the command line and the documentation.
        metavar: how the command line shows its value, such as ``FLOAT``; parsed as JSON unless it is ``TEXT``.
        repeated: whether the command line takes it several times (the given value is then a list).
        needs_text: whether a row's outcome depends on the tokens before it.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage]
    order: ClassVar[int]
    help: ClassVar[str]
    metavar: ClassVar[str] = "FLOAT"
    repeated: ClassVar[bool] = False
    needs_text: ClassVar[bool] = False

    @abstractmethod
    def resolve(self, value: Any, facts: Facts) -> Any | None:
        """The resolved form of what a user gave; None where it changes nothing.

        Raises ``InvalidRequest`` (``refuse``) with the field ``sampling.NAME``.
        """

    def fault(self, value: Any, vocab_size: int) -> str | None:
        """What is wrong with a resolved value that came over the network, or None.

        As it stands, for controls whose resolved values are given ones too: those are resolved again.
        """
        try:
            self.resolve(value, Facts(vocab_size, frozenset(), lambda text: ()))
        except InvalidRequest as error:
            return str(error)
        return None

    @abstractmethod
    def reference(self, row: Tensor, value: Any, text: RowText) -> Tensor:
        """The readable definition, for one row.

        Args:
            row: [V]: float32 logits (LOGITS), or float64 logits divided by the temperature (WARP); -inf for tokens that
                earlier controls excluded.
            value: resolved.

        Returns:
            [V], of the same type; a new tensor, or ``row`` where nothing changes.
        """

    @abstractmethod
    def apply(self, scores: Tensor, token_ids: Tensor | None, values: Sequence[Any], texts: Sequence[RowText]) -> None:
        """The same for n rows with values of their own, in place. Each row's outcome depends on that row alone.

        Args:
            scores: [n, V] float32 logits (LOGITS); [n, s] float64 log-weights (WARP), -inf for excluded tokens and, for
                some controls, with most of the excluded tokens left out.
            token_ids: [n, s] int64, ascending in each row: the tokens of the columns; None where column = token.
            values: n resolved values.
            texts: n; only where ``needs_text`` is set may they be looked at.
        """

    def refuse(self, value: Any, limit: str, part: str = "") -> NoReturn:
        """Raise ``InvalidRequest`` for this control's field, or for a part of it such as ``[3]``."""
        raise InvalidRequest(f"sampling.{self.name}{part}", value, limit)


class NumberControl(Control):
    """A control whose value is one number within limits.

    Attributes:
        neutral: the value that changes nothing.
    """

    neutral: ClassVar[float]

    @abstractmethod
    def limit(self, value: float) -> str | None:
        """What a finite value must be, in words, if it is not; else None."""

    def resolve(self, value: Any, facts: Facts) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(value, "a number")
        # A limit names what is allowed, and no limit allows NaN.
        limit = self.limit(value) if math.isfinite(value) else (self.limit(math.inf) or "finite")
        if limit is not None:
            self.refuse(value, limit)
        return None if value == self.neutral else float(value)


def checked_token_ids(control: Control, value: Any, vocab_size: int, part: str = "") -> tuple[int, ...]:
    """A list of token ids as a tuple. Raises ``InvalidRequest``."""
    if not isinstance(value, list | tuple):
        control.refuse(value, "a list of token ids", part)
    for index, token in enumerate(value):
        checked_token_id(control, token, vocab_size, f"{part}[{index}]")
    return tuple(int(token) for token in value)


def checked_token_id(control: Control, token: Any, vocab_size: int, part: str) -> int:
    """A token id of the vocabulary. Whole floats pass: JSON of protobuf knows no other numbers."""
    whole = (
        isinstance(token, int | float) and not isinstance(token, bool) and math.isfinite(token) and token == int(token)
    )
    if not whole or not 0 <= token < vocab_size:
        control.refuse(token, f"a token id from 0 to {vocab_size - 1}", part)
    return int(token)
