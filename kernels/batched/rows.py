"""Rows with settings of their own, from logits to what may be drawn. ``kernels.reference.distribution`` is the
definition, step by step.

Rows that take the same steps are handled side by side, in groups whose width a row's own content decides: so a row's
numbers do not depend, to the last bit, on the rows beside it. Where anything was excluded, a row goes on as its
*support*, so that what follows costs what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from outrider.controls import CONTROLS, Control, RowText, Stage
from outrider.core.sampling import Sampling
from outrider.kernels.reference import transforms
from outrider.kernels.reference.transforms import Support

# Supports are as wide as the next power of two, and not narrower than this: few widths, few groups.
_MIN_WIDTH = 16


@dataclass(frozen=True)
class Row:
    """What one row of logits is for: the token at ``text.length``."""

    sampling: Sampling
    text: RowText
    allowed: Tensor | None = None  # [V] bool

    @cached_property
    def controls(self) -> dict[str, Any]:
        return dict(self.sampling.controls)

    def has(self, stage: Stage) -> bool:
        return any(control.stage is stage and control.name in self.controls for control in CONTROLS)

    @property
    def order(self) -> tuple:
        """Rows that take the same steps have the same order: beside each other they need not be copied to be handled
        together."""
        sampling = self.sampling
        return (sampling.verifier, sampling.top_k, sampling.top_p < 1.0, self.allowed is not None, *self.controls)


@dataclass(frozen=True)
class Processed:
    """Rows after the grammar's mask and the LOGITS controls.

    Attributes:
        logits: [n, V] float32; zeros in rows that are not usable.
        valid: [n] bool: the model's row holds a distribution.
        usable: [n] bool: and something of it is left.
    """

    logits: Tensor
    valid: Tensor
    usable: Tensor


@dataclass(frozen=True)
class Group:
    """Rows of one width. ``members``: their indices, ascending; the support's rows are in that order."""

    members: list[int]
    support: Support


def processed(logits: Tensor, rows: Sequence[Row], *, may_change: bool) -> Processed:
    """Apply masks and LOGITS controls.

    Args:
        logits: [n, V] float32, the model's.
        rows: n.
        may_change: whether ``logits`` may be written to.
    """
    valid = usable = transforms.valid_rows(logits)
    touched = [i for i, row in enumerate(rows) if row.allowed is not None or row.has(Stage.LOGITS)]
    if touched:
        logits = logits if may_change else logits.clone()
        masked = [i for i in touched if rows[i].allowed is not None]
        if masked:
            allowed = torch.stack([mask for row in rows if (mask := row.allowed) is not None])
            _edit(logits, masked, lambda part: part.masked_fill_(~allowed.to(part.device), -math.inf))
        _apply(Stage.LOGITS, logits, None, rows, range(len(rows)))
        highest = logits.amax(dim=-1)
        valid = valid & ~(highest.isnan() | highest.isposinf())
        usable = valid & torch.isfinite(highest)
    if not bool(usable.all()):
        logits = logits.where(usable[:, None], logits.new_zeros(()))
    return Processed(logits, valid, usable)


def supports(logits: Tensor, rows: Sequence[Row], members: Sequence[int]) -> list[Group]:
    """What may be drawn in the rows ``members``, all with a temperature above 0.

    Args:
        logits: [n, V] float32, processed; not changed.
        rows: n.

    Returns:
        Groups; each member is in one of them.
    """
    groups: list[Group] = []
    for part in _allowed(logits, rows, members):
        alike: dict[tuple, list[int]] = {}
        for index, i in enumerate(part.members):
            sampling = rows[i].sampling
            top_k = sampling.top_k if sampling.top_k < part.logits.shape[-1] else 0
            alike.setdefault((top_k, sampling.top_p < 1.0, rows[i].has(Stage.WARP)), []).append(index)
        for (top_k, has_top_p, has_warp), same in alike.items():
            settings = [rows[part.members[index]].sampling for index in same]
            temperature = _column([sampling.temperature for sampling in settings], logits)
            support = transforms.filtered(take(part.logits, same), temperature=temperature, top_k=top_k)
            if part.token_ids is not None:
                support = Support(take(part.token_ids, same).gather(1, support.token_ids), support.scores, False)
            narrower = [Group([part.members[index] for index in same], support)]
            if has_top_p:
                top_p = _column([sampling.top_p for sampling in settings], logits)
                narrower = _by_width(narrower[0], transforms.nucleus(support.scores, top_p))
            for group in narrower:
                groups += _warped(group, rows) if has_warp else [group]
    return groups


def take(values: Tensor, members: Sequence[int]) -> Tensor:
    """Rows of a tensor, members ascending: a view where they are neighbours."""
    return values[members[0] : members[-1] + 1] if _are_neighbours(members) else values[list(members)]


def take_support(support: Support, members: Sequence[int]) -> Support:
    """``take`` for a support."""
    if len(members) == len(support.scores):
        return support
    return Support(take(support.token_ids, members), take(support.scores, members), support.is_full)


@dataclass(frozen=True)
class _Part:
    """Logits [g, s] of the rows ``members``; ``token_ids`` [g, s] int64 of their columns, None for the vocabulary."""

    members: list[int]
    logits: Tensor
    token_ids: Tensor | None


def _allowed(logits: Tensor, rows: Sequence[Row], members: Sequence[int]) -> list[_Part]:
    """Rows of which masks leave few tokens, as those tokens; before anything is done to the others."""
    masked = [i for i in members if rows[i].allowed is not None or "allowed_token_ids" in rows[i].controls]
    parts: list[_Part] = []
    narrow: set[int] = set()
    if masked:
        kept = take(logits, masked) > -math.inf
        for width, chosen in _widths(kept).items():
            if width < logits.shape[-1]:
                columns = transforms.packed_columns(take(kept, chosen), width)
                part = [masked[index] for index in chosen]
                parts.append(_Part(part, take(logits, part).gather(1, columns), columns))
                narrow |= set(part)
    rest = [i for i in members if i not in narrow]
    return [*parts, _Part(rest, take(logits, rest), None)] if rest else parts


def _warped(group: Group, rows: Sequence[Row]) -> list[Group]:
    support = group.support
    _apply(Stage.WARP, support.scores, None if support.is_full else support.token_ids, rows, group.members)
    return _by_width(group, support.scores > -math.inf)


def _by_width(group: Group, kept: Tensor) -> list[Group]:
    """Narrow each row to what it keeps, [n, s] bool."""
    return [
        Group(
            [group.members[index] for index in chosen],
            transforms.narrowed(take_support(group.support, chosen), take(kept, chosen), width),
        )
        for width, chosen in _widths(kept).items()
    ]


def _widths(kept: Tensor) -> dict[int, list[int]]:
    """The width that each row of [n, s] bool is handled at, and the rows of each."""
    widths: dict[int, list[int]] = {}
    for index, count in enumerate(kept.sum(dim=-1).tolist()):
        width = max(_MIN_WIDTH, 1 << (count - 1).bit_length())
        widths.setdefault(min(width, kept.shape[-1]), []).append(index)
    return widths


def _apply(stage: Stage, scores: Tensor, token_ids: Tensor | None, rows: Sequence[Row], members: Sequence[int]) -> None:
    """A stage's controls, in their order, on scores whose rows are ``members``; in place."""
    for control in CONTROLS:
        if control.stage is stage:
            having = [index for index, i in enumerate(members) if control.name in rows[i].controls]
            if having:
                chosen = [rows[members[index]] for index in having]
                ids = None if token_ids is None else take(token_ids, having)
                _edit(scores, having, lambda part: _apply_one(control, part, ids, chosen))  # noqa: B023 (runs at once)


def _apply_one(control: Control, scores: Tensor, token_ids: Tensor | None, rows: Sequence[Row]) -> None:
    control.apply(scores, token_ids, [row.controls[control.name] for row in rows], [row.text for row in rows])


def _edit(values: Tensor, members: Sequence[int], change: Callable[[Tensor], object]) -> None:
    """Change rows of a tensor in place, members ascending."""
    part = take(values, members)
    change(part)
    if not _are_neighbours(members):
        values[list(members)] = part


def _are_neighbours(members: Sequence[int]) -> bool:
    return members[-1] - members[0] + 1 == len(members)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
