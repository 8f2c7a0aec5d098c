"""How one request samples, after every default was filled in."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

from outrider.core.grammar import Grammar
from outrider.core.logprobs import LogprobsMode

MIN_TEMPERATURE = 1e-3  # below, logits leave what float32 holds; whoever wants the most likely token asks for 0


class Verifier(enum.IntEnum):
    """How proposals are checked; the numbers are those of the protocol. See docs/exactness.md."""

    GREEDY = 1
    REJECTION = 2
    COUPLED = 3

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Sampling:
    """Settings that target and draft both apply (docs/sampling.md has their order).

    Attributes:
        temperature: at least 0; 0 means greedy.
        top_k: keep that many most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches it; in (0, 1].
        seed: 64 bits; with ``choice`` the source of every random number of the request.
        choice: index among the choices of one request.
        verifier: GREEDY if and only if ``temperature`` is 0.
        controls: (name, value) of every further control that changes something, resolved, sorted by name; see
            ``outrider.controls``.
        prompt_len: tokens of the prompt; what follows is output, and some controls look at the output only.
        grammar: the output's language; None for free text.
        logprobs: most likely tokens that are reported beside each output token; None for no log-probabilities.
        prompt_logprobs: the same for the prompt's tokens.
        logprobs_mode: the distribution that they are of.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0
    verifier: Verifier = Verifier.COUPLED
    controls: tuple[tuple[str, Any], ...] = ()
    prompt_len: int = 0
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW

    @property
    def needs_draft_probs(self) -> bool:
        """Whether verification needs the distribution that the draft sampled from."""
        return self.verifier is Verifier.REJECTION


def sampling_fault(sampling: Sampling) -> str | None:
    """What is wrong with settings that came over the network, or None. Names the field and the limit."""
    temperature = sampling.temperature
    if not math.isfinite(temperature) or (temperature != 0.0 and temperature < MIN_TEMPERATURE):
        return f"sampling.temperature is {temperature}, but must be finite and 0 or at least {MIN_TEMPERATURE:g}"
    if not 0.0 < sampling.top_p <= 1.0:
        return f"sampling.top_p is {sampling.top_p}, but must be in (0, 1]"
    if (sampling.temperature == 0.0) != (sampling.verifier is Verifier.GREEDY):
        return (
            f"sampling.verifier is {sampling.verifier.label} at temperature {sampling.temperature}, "
            "but must be greedy at temperature 0 and only there"
        )
    return None
