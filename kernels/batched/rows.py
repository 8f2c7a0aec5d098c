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
from outrider.kernels.batched import wide
from outrider.kernels.batched.wide import are_neighbours, take
from outrider.kernels.reference import noise, transforms
from outrider.kernels.reference.noise import Purpose
from outrider.kernels.reference.transforms import Support


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
            top_p = _column([sampling.top_p for sampling in settings], logits) if has_top_p else None
            for chosen, support in _filtered(take(part.logits, same), temperature, top_k, top_p):
                members = [same[index] for index in chosen]
                if part.token_ids is not None:
                    token_ids = take(part.token_ids, members).gather(1, support.token_ids)
                    support = Support(token_ids, support.scores, False)
                group = Group([part.members[index] for index in members], support)
                groups += _warped(group, rows) if has_warp else [group]
    return groups


def row_keys(rows: Sequence[Row], purpose: Purpose, prefix_hashes: Sequence[int] | None = None) -> Tensor:
    """The keys of rows' random numbers: [n, 2] int64."""
    return noise.noise_keys(
        [row.sampling.seed for row in rows],
        [row.sampling.choice for row in rows],
        [row.text.length for row in rows],
        purpose,
        prefix_hashes,
    )


def take_support(support: Support, members: Sequence[int]) -> Support:
    """``take`` for a support, members ascending."""
    if len(members) == len(support.scores):
        return support
    return Support(take(support.token_ids, members), take(support.scores, members), support.is_full)


@dataclass(frozen=True)
class _Part:
    """Logits [g, s] of the rows ``members``; ``token_ids`` [g, s] int64 of their columns, None for the vocabulary."""

    members: list[int]
    logits: Tensor
    token_ids: Tensor | None


def _filtered(
    logits: Tensor, temperature: Tensor, top_k: int, top_p: Tensor | None
) -> list[tuple[list[int], Support]]:
    """Rows [g, s] after temperature, top-k and top-p, by width: their indices, and what may be drawn in them.

    temperature, top_p: [g, 1] float64; None keeps all.
    """
    everyone = list(range(len(logits)))
    if top_p is None:
        return [(everyone, wide.filtered(logits, temperature, top_k))]
    found = wide.nuclei(logits, temperature, top_p) if not top_k else []
    decided = {index for members, _ in found for index in members}
    left = [index for index in everyone if index not in decided]
    if left:
        support = wide.filtered(take(logits, left), take(temperature, left), top_k)
        kept = transforms.nucleus(support.scores, take(top_p, left))
        found += [(group.members, group.support) for group in _by_width(Group(left, support), kept)]
    return found


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
        widths.setdefault(wide.width_of(count, kept.shape[-1]), []).append(index)
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
    if not are_neighbours(members):
        values[list(members)] = part


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
