"""Holds texts against the oracle and keeps what was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.exactness.evidence import Evidence, concatenate
from outrider.exactness.oracle import Oracle
from outrider.exactness.rows import MAX_UNCERTAIN, Counts, Hashing, Rows, measure
from outrider.exactness.sampler import Text

# How far the score of a token that greedy decoding chose may lie below the best one.
GREEDY_GAP = 1e-3
# How far log-probabilities may lie from the oracle's.
LOGPROB_TOLERANCE = 2e-3


class Judge:
    """Texts of one kind of request, one after the other.

    Attributes:
        counts: what became of their tokens.
    """

    def __init__(self, oracle: Oracle, options: Mapping[str, Any], seed: int) -> None:
        self.counts = Counts()
        self._oracle = oracle
        self._mode = options.get("logprobs_mode") or "raw"
        self._hashing = Hashing(oracle.vocab_size, seed)
        self._rng = np.random.default_rng([seed, 0])
        self._parts: list[Evidence] = []
        self._num_texts = 0
        self._impossible: list[str] = []
        self._logprobs: list[str] = []

    @property
    def is_hopeless(self) -> bool:
        """Whether more texts would change nothing: many tokens are wrong already, or no row leaves a choice."""
        return len(self._impossible) > 100 or (self.counts.judged == 0 and self.counts.forced > 1000)

    def evidence(self) -> Evidence | None:
        """Of all texts so far; None at temperature 0 and where nothing was judged."""
        return concatenate(self._parts) if any(len(part) for part in self._parts) else None

    def faults(self, shown: int) -> list[str]:
        """What is wrong with certainty, in words."""
        found = []
        what = "are not the most likely ones" if self._oracle.is_greedy else "are excluded by the settings"
        for kind, cases in ((f"tokens {what}", self._impossible), ("log-probabilities are wrong", self._logprobs)):
            if cases:
                found.append(f"{len(cases)} {kind}, such as {'; '.join(cases[:shown])}")
        return found

    def take(self, text: Text) -> None:
        """Judge one text."""
        self._num_texts += 1
        if not text.output:
            return
        if text.prompt_logprobs is not None and self._mode == "raw":
            self._check_prompt(text)
        for rows in self._oracle.rows(text.prompt_tokens, text.output):
            self._take_rows(rows, text)

    def _take_rows(self, rows: Rows, text: Text) -> None:
        if text.logprobs is not None:
            self._check_logprobs(rows, text)
        if self._oracle.is_greedy:
            self._take_greedy(rows, text)
            return
        evidence, counts, impossible = measure(
            rows,
            text.prompt_tokens,
            text.output,
            labels={"text": self._num_texts, "prompt": text.prompt},
            place=text.place,
            hashing=self._hashing,
            rng=self._rng,
        )
        self._parts.append(evidence)
        self.counts += counts
        self._impossible += [_where(text, index) for index in impossible]

    def _take_greedy(self, rows: Rows, text: Text) -> None:
        tokens = torch.tensor(text.output[rows.start : rows.start + len(rows.scores)])
        gap = rows.scores.amax(dim=-1) - rows.scores.gather(1, tokens[:, None])[:, 0]
        wrong = ~(gap < GREEDY_GAP)
        near = int(((gap > 0.0) & ~wrong).sum())
        self.counts += Counts(judged=len(tokens) - near, on_border=near, impossible=int(wrong.sum()))
        self._impossible += [
            f"{_where(text, rows.start + i)}, {float(gap[i]):.3g} below" for i in wrong.nonzero()[:, 0].tolist()
        ]

    def _check_logprobs(self, rows: Rows, text: Text) -> None:
        own = torch.log_softmax((rows.raw if self._mode == "raw" else rows.scores).double(), dim=-1)  # [T, V]
        entries = list(zip(text.output, text.logprobs or (), strict=True))[rows.start : rows.start + len(own)]
        for index, (token, entry) in enumerate(entries):
            if self._mode != "raw" and float(rows.borders.uncertain_mass[index]) > MAX_UNCERTAIN:
                continue
            logprob, top = entry
            for tried, value in ((token, logprob), *top.items()):
                if value is None or not _close(own[index], tried, value):
                    wanted = float(own[index, tried])
                    self._logprobs.append(
                        f"{_where(text, rows.start + index)}: {value} for token {tried}, not {wanted:.4f}"
                    )
                    break

    def _check_prompt(self, text: Text) -> None:
        own = self._oracle.prompt_log_probs(text.prompt_tokens)
        values = text.prompt_logprobs or ()
        if len(values) != len(text.prompt_tokens) or values[0] is not None:
            self._logprobs.append(
                f"{len(values)} for {len(text.prompt_tokens)} tokens of the prompt (seed {text.seed})"
            )
            return
        for index, (token, value) in enumerate(zip(text.prompt_tokens[1:], values[1:], strict=True)):
            if value is None or not _close(own[index], token, value):
                self._logprobs.append(f"{value} for token {token} at {index + 1} of the prompt (seed {text.seed})")
                return


def _close(log_probs: Tensor, token: int, value: float) -> bool:
    wanted = float(log_probs[token])
    return wanted == value or abs(wanted - value) <= LOGPROB_TOLERANCE * max(1.0, abs(wanted) / 10.0)


def _where(text: Text, index: int) -> str:
    choice = f", choice {text.choice}" if text.choice else ""
    return f"token {text.output[index]} at {index} of the output (seed {text.seed}{choice})"
