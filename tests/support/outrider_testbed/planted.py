"""Faults that tests plant in a target: each changes what a step's verification sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from outrider.workers.target.step import Admission, Computed, Rows, verified_rows


def temperature_forgotten(span: Rows, logits: Tensor) -> None:
    """The draft applies the temperature, the target does not."""
    logits *= span.sequence.sampling.temperature


def penalties_once_a_step(span: Rows, logits: Tensor) -> None:
    """Row i does not count the i proposals before it (case S3)."""
    controls = dict(span.sequence.sampling.controls)
    proposal = span.sequence.plan.proposal
    for row in range(1, len(logits)):
        for token in proposal[:row]:
            logits[row, token] += controls.get("frequency_penalty", 0.0)


def bonus_by_the_row_before(span: Rows, logits: Tensor) -> None:
    """The token behind a whole accepted block is drawn from the row of the block's last token."""
    if len(logits) > 1:
        logits[-1] = logits[-2]


FAULTS: dict[str, Callable[[Rows, Tensor], None]] = {
    fault.__name__: fault for fault in (temperature_forgotten, penalties_once_a_step, bonus_by_the_row_before)
}


def with_fault(name: str, admission: Admission, computed: Computed) -> Computed:
    """What a faulty target would have computed; on one rank."""
    if computed.logits is None:
        return computed
    logits = computed.logits.clone()
    for span in verified_rows(admission.admitted):
        FAULTS[name](span, logits[span.start : span.stop])
    return replace(computed, logits=logits)
