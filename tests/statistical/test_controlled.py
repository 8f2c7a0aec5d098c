"""Committed text follows the target's own distribution under sampling controls and grammar-like masks, and the judge
finds these planted bugs, with the same scenarios and numbers of texts:

  - repetition counted once for each step instead of once for each token (``CountedOncePerStep``)
  - the penalty of row i does not see the proposals before it (``ProposalsNotCounted``)
  - a later proposal counts for the rows before it (``LaterProposalsCounted``)
  - the prompt's tokens counted as output by the presence and frequency penalties (``PromptCountedAsOutput``)
  - min_p on one side only: the draft's (``TargetWithoutMinP``), or all but the draft's report
    (``DraftReportsWithoutMinP``)
  - the mask forgotten on the bonus row (``BonusUnmasked``), or not moved on by the proposals (``MaskNotMovedOn``)
  - the end allowed one token too early, and forbidden one too long (``EndTooEarly``, ``EndTooLate``)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.controls import RowText
from outrider.core.sampling import Sampling
from outrider.kernels.batched import draft, verify
from outrider.kernels.batched.data import Ask, Chain

from . import models
from .controlled import BY_NAME, CONTROLLED, Controlled, ControlledDecoder
from .harness import PROMPT_LENGTH, Outcome, check

FILLER = models.PROMPT[0]  # a token of the prompt: for the repetition penalty, once more says nothing new

true_entries = verify._entries


@pytest.mark.parametrize("scenario", CONTROLLED, ids=lambda scenario: scenario.name)
def test_texts_follow_the_target(scenario: Controlled) -> None:
    report = check(scenario, ControlledDecoder)
    print(scenario.name, report)
    assert report.outcome is Outcome.PASSED, str(report)


class Planted(ControlledDecoder):
    """A decoder with a bug. ``patches`` replaces functions of the product: (module, name, function)."""

    patches: tuple[tuple[Any, str, Any], ...] = ()


class CountedOncePerStep(Planted):
    """Of the tokens that a step committed, the last one counts."""

    def _run_batch(self, names: np.ndarray) -> Any:
        self.uncounted: set[tuple[int, int]] = set()
        return super()._run_batch(names)

    def counted_text(self, name: int, length: int) -> list[int]:
        text = super().counted_text(name, length)
        return [FILLER if (name, position) in self.uncounted else token for position, token in enumerate(text)]

    def commit(self, going: np.ndarray, tokens: np.ndarray, num_accepted: np.ndarray, next_tokens: np.ndarray) -> None:
        for name, length, accepted in zip(going, self.length[going], num_accepted, strict=True):
            self.uncounted |= {(name, length + i) for i in range(accepted)}
        super().commit(going, tokens, num_accepted, next_tokens)


def _change_texts(change: Any) -> Any:
    """``_entries`` with another text for each row."""

    def entries(index: int, chain: Chain) -> list:
        return [
            replace(entry, row=replace(entry.row, text=change(entry.row.text, chain)))
            for entry in true_entries(index, chain)
        ]

    return entries


def _without_proposals(text: RowText, chain: Chain) -> RowText:
    return replace(text, tokens=[*chain.text, *[FILLER] * len(chain.draft_tokens)])


def _with_one_more(text: RowText, chain: Chain) -> RowText:
    if text.length == len(text.tokens):
        return text
    return replace(text, tokens=[*text.tokens[1 : text.length + 1]])  # one token further on; a token of the prompt goes


class ProposalsNotCounted(Planted):
    patches = ((verify, "_entries", _change_texts(_without_proposals)),)


class LaterProposalsCounted(Planted):
    patches = ((verify, "_entries", _change_texts(_with_one_more)),)


class PromptCountedAsOutput(Planted):
    def target_sampling(self, seed: int) -> Sampling:
        return self.scenario.sampling(seed, prompt_len=0)


def _without(controls: tuple[tuple[str, Any], ...], name: str) -> tuple[tuple[str, Any], ...]:
    return tuple(control for control in controls if control[0] != name)


class TargetWithoutMinP(Planted):
    def target_sampling(self, seed: int) -> Sampling:
        return self.scenario.sampling(seed, controls=_without(self.scenario.controls, "min_p"))


class DraftReportsWithoutMinP(Planted):
    def draw(self, going: np.ndarray, position: np.ndarray, logits: Any) -> tuple[np.ndarray, Any]:
        tokens, _ = super().draw(going, position, logits)
        controls = _without(self.scenario.controls, "min_p")
        asks = [Ask(self.scenario.sampling(0, controls=controls), int(place)) for place in position]
        reported = draft.draw(logits, asks, top_m=self.scenario.top_m)
        return tokens, [(drawn.token_ids, drawn.probs) for drawn in reported if drawn is not None]


class BonusUnmasked(Planted):
    def masks(self, output: list[int], proposal: list[int]) -> np.ndarray:
        allowed = super().masks(output, proposal)
        if len(proposal) == self.k:
            allowed[self.k] = True
        return allowed


class MaskNotMovedOn(Planted):
    def masks(self, output: list[int], proposal: list[int]) -> np.ndarray:
        return np.repeat(super().masks(output, [])[:1], len(proposal) + 1, axis=0)


def _shifted_end(shift: int) -> Any:
    def target_sampling(self: Planted, seed: int) -> Sampling:
        number, ends = dict(self.scenario.controls)["min_tokens"]
        controls = (*_without(self.scenario.controls, "min_tokens"), ("min_tokens", (number + shift, ends)))
        return self.scenario.sampling(seed, controls=tuple(sorted(controls)))

    return target_sampling


class EndTooEarly(Planted):
    target_sampling = _shifted_end(-1)


class EndTooLate(Planted):
    target_sampling = _shifted_end(1)


PLANTED = [
    (CountedOncePerStep, "rejection-repetition"),
    (ProposalsNotCounted, "rejection-repetition"),
    (ProposalsNotCounted, "coupled-penalties"),
    (LaterProposalsCounted, "rejection-repetition"),
    (PromptCountedAsOutput, "rejection-penalties"),
    (PromptCountedAsOutput, "coupled-penalties"),
    (TargetWithoutMinP, "rejection-min-p"),
    (TargetWithoutMinP, "coupled-cuts"),
    (DraftReportsWithoutMinP, "rejection-min-p"),
    (BonusUnmasked, "rejection-mask"),
    (BonusUnmasked, "coupled-mask"),
    (MaskNotMovedOn, "rejection-mask"),
    (EndTooEarly, "coupled-bans"),
    (EndTooLate, "rejection-mask"),
]


@pytest.mark.parametrize(("bug", "scenario"), PLANTED, ids=[f"{bug.__name__}-{name}" for bug, name in PLANTED])
def test_a_planted_bug_is_caught(bug: type[Planted], scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, function in bug.patches:
        monkeypatch.setattr(module, name, function)
    report = check(BY_NAME[scenario], bug)
    print(bug.__name__, scenario, report)
    assert report.outcome is Outcome.FAILED, str(report)


def test_contexts_are_the_outputs_in_the_order_in_which_they_are_listed() -> None:
    scenario = CONTROLLED[0]
    for context, output in enumerate(scenario.outputs[:31]):
        for token in range(scenario.vocab_size):
            assert scenario.outputs[scenario.truth.next_context[context, token]] == (*output, token)
    assert len(models.PROMPT) == PROMPT_LENGTH
