"""A step's exchange and decision over a large vocabulary: with compiled passes and without, for mixed settings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.core.plan import SequenceError, SequencePlan, SequenceResult, StepPlan
from outrider.core.sampling import Sampling, Verifier
from outrider.kernels.batched import wide
from outrider.kernels.cpu.draws import load_draws
from outrider.workers.engine.parallel import Parallel
from outrider.workers.target.codec import Digest
from outrider.workers.target.decide import decide
from outrider.workers.target.state import Admitted
from outrider.workers.target.step import Admission, Computed, RankStep

VOCAB_SIZE = 6_000
SETTINGS = [
    Sampling(temperature=0.0, verifier=Verifier.GREEDY),
    Sampling(seed=1),
    Sampling(seed=2, temperature=0.8, top_p=0.95),
    Sampling(seed=3, top_k=50, verifier=Verifier.REJECTION),
    Sampling(seed=4),
    Sampling(temperature=0.0, verifier=Verifier.GREEDY, controls=(("presence_penalty", 0.5),)),
    Sampling(seed=5, controls=(("min_p", 0.05),)),
]


class WholeEngine:
    """One rank's engine, as far as it is asked for what a pass gave."""

    vocab_offset = 0
    device = torch.device("cpu")

    def gather_logits(self, local_logits: Tensor) -> Tensor:
        return local_logits


def decided(logits: Tensor, num_proposals: int) -> tuple[SequenceResult, ...]:
    """What each of the settings' sequences commits; their rows are those of the logits in order."""
    tokens = (7, *logits.argmax(dim=-1).tolist()[:num_proposals])
    plans = [
        SequencePlan(
            index,
            1,
            10,
            tokens,
            num_proposal_tokens=num_proposals,
            logits_rows=tuple(range(num_proposals + 1)),
            sampling=sampling,
        )
        for index, sampling in enumerate(SETTINGS)
    ]
    admitted = [
        Admitted(index, plan, SETTINGS[index], (0,), tuple(range(20, 30)) + tokens) for index, plan in enumerate(plans)
    ]
    admission = Admission(admitted, [], Digest(len(plans), 0, len(logits), 0))
    step = RankStep(WholeEngine(), Parallel.single(), None)  # type: ignore[arg-type] # the table is not looked into
    exchanged = step.exchange(admission, Computed(logits, None))
    assert [report.rank for report in exchanged.reports] == [0]
    return decide(StepPlan(1, 1, tuple(plans)), admission, exchanged)


@pytest.mark.parametrize("num_proposals", [0, 2])
def test_compiled_passes_commit_what_torch_commits(num_proposals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if load_draws() is None:
        pytest.skip("no compiled kernels here")
    generator = torch.Generator().manual_seed(num_proposals)
    row = 2.5 * torch.randn(num_proposals + 1, VOCAB_SIZE, generator=generator)
    row[torch.arange(num_proposals + 1), row.argmax(dim=-1)] += 8.0  # so that proposals are accepted now and then
    logits = row.repeat(len(SETTINGS), 1)
    logits[4 * (num_proposals + 1), 99] = torch.nan  # of one sequence, whose rows are given to torch
    results = decided(logits, num_proposals)
    monkeypatch.setattr(wide, "MIN_WIDTH", 1 << 60)
    plain = decided(logits, num_proposals)
    assert results == plain
    assert [result.error for result in results].count(SequenceError.INVALID_LOGITS) == 1
    assert results[4].error is SequenceError.INVALID_LOGITS
    good = [result for result in results if result.error is None]
    assert all(len(result.committed) == result.num_accepted + 1 for result in good)
    assert num_proposals == 0 or any(result.num_accepted for result in good)
