"""Verification of many chains, each with settings of its own. ``kernels.reference.verify`` names things and cites the
papers; ``kernels.reference.chain`` is the definition.

A row's verdict depends on that row alone: its logits, its settings, the tokens before it, and random numbers that its
position names. So rows may be judged in any company. On a CPU, where time grows with the rows, chains advance one row
at a time, as far as their proposals are accepted; on other devices, where each turn costs a wait, and where rows are
small, all rows are judged at once, and a chain's verdict is read off those that it reaches.

What a device does for one group of rows is ``sampling.draw`` or ``rejection.decide``, on plain arrays. A fused kernel
may take the place of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.controls import RowText, by_name
from outrider.core.logprobs import LogprobsMode, TokenLogprobs
from outrider.core.sampling import Verifier
from outrider.kernels.batched import wide
from outrider.kernels.batched.data import Chain, Outcome
from outrider.kernels.batched.draft import row_keys
from outrider.kernels.batched.logprobs import score_rows, support_logprobs, wide_logprobs
from outrider.kernels.batched.proposals import Proposal, draft_matrix
from outrider.kernels.batched.rows import Group, Row, processed, supports, take, take_support
from outrider.kernels.reference import rejection, sampling
from outrider.kernels.reference.errors import invalid_logits, nothing_allowed
from outrider.kernels.reference.noise import Purpose
from outrider.kernels.reference.transforms import Support

# Up to so many entries of logits all rows are judged at once on a CPU too: there the calls cost more than the numbers.
_SMALL = 1 << 18


@dataclass(frozen=True)
class _Entry:
    """One row of one chain."""

    chain: int
    logits: Tensor  # [V] float32
    row: Row
    proposed: int | None
    draft_row: tuple[Tensor, Tensor] | None  # None: the proposal was chosen with certainty

    @property
    def wants_logprobs(self) -> bool:
        return self.row.sampling.logprobs is not None


@dataclass(frozen=True)
class _Verdict:
    token: int
    is_accepted: bool = False
    error: str | None = None
    is_nothing_allowed: bool = False
    logprobs: TokenLogprobs | None = None


def verify(chains: Sequence[Chain]) -> list[Outcome]:
    """One outcome for each chain; each depends on its own chain alone. Nothing is changed."""
    faults = [_fault(chain) for chain in chains]
    entries = [_entries(index, chain) if not faults[index] else [] for index, chain in enumerate(chains)]
    verdicts: list[list[_Verdict]] = [[] for _ in chains]
    going = [index for index in range(len(chains)) if not faults[index]]
    if going and _judge_all_at_once(chains[going[0]].logits, sum(len(rows) for rows in entries)):
        everything = [entry for index in going for entry in entries[index]]
        for entry, verdict in zip(everything, _judge(everything), strict=True):
            verdicts[entry.chain].append(verdict)
    else:
        level = 0
        while going:
            judged = _judge([entries[index][level] for index in going])
            for index, verdict in zip(going, judged, strict=True):
                verdicts[index].append(verdict)
            going = [index for index, verdict in zip(going, judged, strict=True) if verdict.is_accepted]
            level += 1
    return [Outcome(error=fault) if fault else _outcome(rows) for fault, rows in zip(faults, verdicts, strict=True)]


def _judge_all_at_once(logits: Tensor, num_rows: int) -> bool:
    return logits.device.type != "cpu" or num_rows * logits.shape[-1] <= _SMALL


def _fault(chain: Chain) -> str | None:
    """Why a chain cannot be verified at all."""
    num_rows, num_proposals = len(chain.logits), len(chain.draft_tokens)
    if num_rows != num_proposals + 1:
        return f"{num_rows} logits rows fit {num_rows - 1} proposals, not {num_proposals}"
    if chain.sampling.verifier is Verifier.REJECTION and len(chain.draft_rows) not in (0, num_proposals):
        return f"{num_proposals} proposals need as many q rows, not {len(chain.draft_rows)}"
    if chain.allowed is not None and tuple(chain.allowed.shape) != tuple(chain.logits.shape):
        return f"the grammar's mask is {tuple(chain.allowed.shape)}, and the logits {tuple(chain.logits.shape)}"
    controls = [by_name(name) for name, _ in chain.sampling.controls]
    if len(chain.text) < chain.first_position and any(control and control.needs_text for control in controls):
        return f"the text before position {chain.first_position} has {len(chain.text)} tokens"
    return None


def _entries(index: int, chain: Chain) -> list[_Entry]:
    """A chain's rows, up to the first proposal that is no token: it counts as absent together with all after it."""
    vocab_size, tokens = chain.logits.shape[-1], list(chain.draft_tokens)
    usable = next((i for i, token in enumerate(tokens) if not 0 <= token < vocab_size), len(tokens))
    text = [*chain.text[: chain.first_position], *tokens[:usable]]
    is_rejection = chain.sampling.verifier is Verifier.REJECTION
    return [
        _Entry(
            index,
            chain.logits[i],
            Row(
                chain.sampling,
                RowText(text, chain.first_position + i, chain.sampling.prompt_len),
                None if chain.allowed is None else chain.allowed[i],
            ),
            tokens[i] if i < usable else None,
            chain.draft_rows[i] if is_rejection and chain.draft_rows and i < usable else None,
        )
        for i in range(usable + 1)
    ]


def _outcome(verdicts: Sequence[_Verdict]) -> Outcome:
    """Reads a chain's outcome off its rows, as far as it reaches them."""
    for num_accepted, verdict in enumerate(verdicts):
        if verdict.error is not None:
            return Outcome(error=verdict.error, is_invalid_logits=True, is_nothing_allowed=verdict.is_nothing_allowed)
        if not verdict.is_accepted:
            reached = [row.logprobs for row in verdicts[: num_accepted + 1]]
            return Outcome(num_accepted, verdict.token, logprobs=tuple(entry for entry in reached if entry is not None))
    raise AssertionError("a chain's last row has no proposal to accept")


def _judge(entries: Sequence[_Entry]) -> list[_Verdict]:
    """What each row commits if it is reached."""
    order = sorted(range(len(entries)), key=lambda index: entries[index].row.order)
    judged = _judge_sorted([entries[index] for index in order])
    verdicts = [_Verdict(-1)] * len(entries)
    for index, verdict in zip(order, judged, strict=True):
        verdicts[index] = verdict
    return verdicts


def _judge_sorted(entries: Sequence[_Entry]) -> list[_Verdict]:
    rows = [entry.row for entry in entries]
    each = [entry.logits for entry in entries]  # [V] float32
    found = _judge_wide(each, each, entries, [i for i, row in enumerate(rows) if wide.is_untouched(row)])
    left = [i for i in range(len(entries)) if i not in found]
    if left:
        found |= zip(left, _judge_left([entries[i] for i in left]), strict=True)
    return [found[i] for i in range(len(entries))]


def _judge_left(entries: Sequence[_Entry]) -> list[_Verdict]:
    """Verdicts of rows that are changed before they are judged, or that need torch."""
    rows = [entry.row for entry in entries]
    single = len(entries) == 1
    raw = entries[0].logits[None] if single else torch.stack([entry.logits for entry in entries])  # [n, V] float32
    needs_raw = any(entry.wants_logprobs for entry in entries)
    ready = processed(raw, rows, may_change=not single and not needs_raw)
    valid, usable = torch.stack([ready.valid, ready.usable]).tolist()
    verdicts = [
        _Verdict(-1) if is_usable else _refused(row, is_valid)
        for row, is_valid, is_usable in zip(rows, valid, usable, strict=True)
    ]
    members = [i for i, is_usable in enumerate(usable) if is_usable]
    touched = [i for i in members if not wide.is_untouched(rows[i])]
    found = _judge_wide(raw.unbind(), ready.logits.unbind(), entries, touched)
    for i, verdict in found.items():
        verdicts[i] = verdict
    members = [i for i in members if i not in found]
    greedy = [i for i in members if rows[i].sampling.verifier is Verifier.GREEDY]
    if greedy:
        tokens = take(ready.logits, greedy).max(dim=-1).indices.tolist()
        for i, token in zip(greedy, tokens, strict=True):
            verdicts[i] = _Verdict(token, token == entries[i].proposed)
    groups = supports(ready.logits, rows, [i for i in members if rows[i].sampling.verifier is not Verifier.GREEDY])
    for group in groups:
        for i, verdict in _judge_group(group, entries):
            verdicts[i] = verdict
    wanting = [i for i in members if entries[i].wants_logprobs]
    for i, logprobs in _logprobs(entries, verdicts, wanting, raw, ready.logits, groups):
        verdicts[i] = replace(verdicts[i], logprobs=logprobs)
    return verdicts


def _refused(row: Row, is_valid: bool) -> _Verdict:
    error = (nothing_allowed if is_valid else invalid_logits)(row.text.length)
    return _Verdict(-1, error=error, is_nothing_allowed=is_valid)


def _judge_wide(
    raw: Sequence[Tensor], logits: Sequence[Tensor], entries: Sequence[_Entry], members: Sequence[int]
) -> dict[int, _Verdict]:
    """Verdicts of rows ``members``, by index: of those that compiled passes decide.

    Args:
        raw: [V] each, the model's; logits: processed.
    """
    if not members or wide.wide_draws(logits[members[0]]) is None:
        return {}
    rows = [entry.row for entry in entries]
    plain = [i for i in members if wide.is_plain(rows[i])]
    greedy, coupled, others = (
        [i for i in plain if rows[i].sampling.verifier is verifier]
        for verifier in (Verifier.GREEDY, Verifier.COUPLED, Verifier.REJECTION)
    )
    same = wide.argmax(logits, greedy) | wide.draw(logits, rows, coupled, Purpose.COUPLED)
    verdicts = {i: _Verdict(token, token == entries[i].proposed) for i, token in same.items()}
    offered, draft_ids, draft_probs = _offered(entries, others)
    alone = sorted(set(others) - set(offered))
    verdicts |= {i: _Verdict(token) for i, token in wide.draw(logits, rows, alone, Purpose.TARGET).items()}
    tokens = [_proposed(entries[i]) for i in offered]
    for i, (kept, token) in wide.decide(logits, rows, offered, tokens, draft_ids, draft_probs).items():
        verdicts[i] = _Verdict(_proposed(entries[i]) if kept else token, kept)
    wanting = [i for i in verdicts if entries[i].wants_logprobs]
    reported = [raw[i] if _is_raw(entries[i]) else logits[i] for i in wanting]
    filters = wide.filters_of([rows[i] for i in wanting], [_is_raw(entries[i]) for i in wanting])
    tokens, top = [verdicts[i].token for i in wanting], [rows[i].sampling.logprobs or 0 for i in wanting]
    for i, logprobs in zip(wanting, wide_logprobs(reported, filters, tokens, top), strict=True):
        verdicts[i] = replace(verdicts[i], logprobs=logprobs)
    return verdicts


def _is_raw(entry: _Entry) -> bool:
    """Whether the log-probabilities that a row reports are the model's own."""
    return entry.row.sampling.logprobs_mode is LogprobsMode.RAW


def _judge_group(group: Group, entries: Sequence[_Entry]) -> list[tuple[int, _Verdict]]:
    """Verdicts of the rows of one group, by index."""
    verdicts: list[tuple[int, _Verdict]] = []
    is_rejection = [entries[i].row.sampling.verifier is Verifier.REJECTION for i in group.members]
    coupled = [j for j, flag in enumerate(is_rejection) if not flag]
    if coupled:
        verdicts += _drawn(group, coupled, entries, Purpose.COUPLED)
    others = [i for i, flag in zip(group.members, is_rejection, strict=True) if flag]
    offered, draft_ids, draft_probs = _offered(entries, others)
    alone = [j for j, i in enumerate(group.members) if i in set(others) - set(offered)]
    if alone:  # bonus tokens, and proposals that count as absent
        verdicts += _drawn(group, alone, entries, Purpose.TARGET)
    if offered:
        chosen = [entries[i] for i in offered]
        device = group.support.scores.device
        tokens = [_proposed(entry) for entry in chosen]
        accepted, own = rejection.decide(
            take_support(group.support, [group.members.index(i) for i in offered]),
            torch.tensor(tokens, device=device),
            draft_ids.to(device),
            draft_probs.to(device),
            row_keys([entry.row for entry in chosen], Purpose.ACCEPT).to(device),
            row_keys([entry.row for entry in chosen], Purpose.RESIDUAL).to(device),
        )
        decided = zip(offered, tokens, accepted.tolist(), own.tolist(), strict=True)
        verdicts += [(i, _Verdict(proposed if kept else token, kept)) for i, proposed, kept, token in decided]
    return verdicts


def _proposed(entry: _Entry) -> int:
    return -1 if entry.proposed is None else entry.proposed


def _offered(entries: Sequence[_Entry], members: Sequence[int]) -> tuple[list[int], Tensor, Tensor]:
    """Which of the rows ``members`` have a proposal that its q row can have produced, and those q rows."""
    proposals = {
        i: Proposal(_proposed(entries[i]), entries[i].draft_row) for i in members if entries[i].proposed is not None
    }
    return draft_matrix(proposals, entries[members[0]].logits.shape[-1] if members else 0)


def _drawn(
    group: Group, chosen: Sequence[int], entries: Sequence[_Entry], purpose: Purpose
) -> list[tuple[int, _Verdict]]:
    """Draws from p. Under coupled a proposal is accepted if it is what was drawn."""
    members = [group.members[j] for j in chosen]
    keys = row_keys([entries[i].row for i in members], purpose)
    tokens = sampling.draw(take_support(group.support, chosen), keys).tolist()
    is_coupled = purpose is Purpose.COUPLED
    return [
        (i, _Verdict(token, is_coupled and token == entries[i].proposed))
        for i, token in zip(members, tokens, strict=True)
    ]


def _logprobs(
    entries: Sequence[_Entry],
    verdicts: Sequence[_Verdict],
    wanting: Sequence[int],
    raw: Tensor,
    logits: Tensor,
    groups: Sequence[Group],
) -> list[tuple[int, TokenLogprobs]]:
    """Log-probabilities of the tokens that rows ``wanting`` commit, by index."""
    found: list[tuple[int, TokenLogprobs]] = []
    settings = [entry.row.sampling for entry in entries]
    top = [sampling.logprobs or 0 for sampling in settings]
    by_model = [i for i in wanting if settings[i].logprobs_mode is LogprobsMode.RAW]
    greedy = [
        i for i in wanting if settings[i].logprobs_mode is not LogprobsMode.RAW and settings[i].temperature == 0.0
    ]
    for members, values in ((by_model, raw), (greedy, logits)):
        if members:
            tokens = [verdicts[i].token for i in members]
            found += zip(members, score_rows(take(values, members), tokens, [top[i] for i in members]), strict=True)
    for group in groups:
        chosen = [
            j
            for j, i in enumerate(group.members)
            if settings[i].logprobs is not None and settings[i].logprobs_mode is not LogprobsMode.RAW
        ]
        if chosen:
            members = [group.members[j] for j in chosen]
            tokens = [verdicts[i].token for i in members]
            support: Support = take_support(group.support, chosen)
            found += zip(members, support_logprobs(support, tokens, [top[i] for i in members]), strict=True)
    return found
