"""How the leader deals with grammars that are late, broken, or gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.core.errors import InvalidRequest
from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.plan import SequenceError, SequencePlan, SequenceResult, StepPlan
from outrider.core.sampling import Sampling, Verifier
from outrider.grammar import GrammarCompiler, GrammarError
from outrider.workers.engine.batch import SequenceRows
from outrider.workers.engine.parallel import Parallel
from outrider.workers.matchers import MatcherMaker
from outrider.workers.target import leader as leader_module
from outrider.workers.target.leader import Leader
from outrider.workers.target.state import Limits, SequenceTable
from outrider.workers.target.step import RankStep

VOCAB_SIZE = 10
LIMITS = Limits(
    vocab_size=VOCAB_SIZE, max_model_len=64, num_blocks=16, block_size=4, max_num_batched_tokens=20, max_num_seqs=8
)
FREE = Sampling(temperature=0.0, verifier=Verifier.GREEDY, prompt_len=2)
BOUND = replace(FREE, grammar=Grammar(GrammarKind.REGEX, "even"))


class NextNumber:
    """A model that says: the token after v is v + 1."""

    vocab_offset = 0
    device = torch.device("cpu")

    def forward(self, batch: Sequence[SequenceRows]) -> Tensor:
        return torch.tensor([[float(rows.tokens[row])] for rows in batch for row in rows.logits_rows])

    def local_logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot((hidden[:, 0].long() + 1) % VOCAB_SIZE, VOCAB_SIZE).float()

    def gather_logits(self, local_logits: Tensor) -> Tensor:
        return local_logits


class EvenNumbers:
    """A matcher that allows even numbers, and nothing but 8 after 6."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []

    def allowed(self, output: Sequence[int], proposal: Sequence[int] = ()) -> np.ndarray:
        self.asked.append((list(output), list(proposal)))
        if any(token % 2 for token in output):
            raise GrammarError(f"token {output} is odd")
        rows = np.zeros((len(proposal) + 1, VOCAB_SIZE), dtype=np.bool_)
        for index, last in enumerate([output[-1] if output else 0, *proposal]):
            rows[index, [8] if last == 6 else slice(0, None, 2)] = True
        return rows


class Maker:
    """Hands out futures that the test completes."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def start(self, grammar: Grammar) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def run(maker: Maker) -> Iterator[Callable[..., tuple[SequenceResult, ...]]]:
    table = SequenceTable(LIMITS)
    leader = Leader(RankStep(NextNumber(), Parallel.single(), table), None, maker)  # type: ignore[arg-type]
    leader.start()
    steps = iter(range(1, 1000))

    def run(*plans: SequencePlan, released: tuple[int, ...] = ()) -> tuple[SequenceResult, ...]:
        result = leader.submit(StepPlan(1, next(steps), plans, released)).result(timeout=60)
        assert result is not None
        return result.sequences

    yield run
    assert leader.stop()


def first(seq_id: int, sampling: Sampling, tokens: tuple[int, ...] = (1, 5)) -> SequencePlan:
    return SequencePlan(
        seq_id, 1, 0, tokens, block_append=(2 * seq_id, 2 * seq_id + 1), logits_rows=(1,), sampling=sampling
    )


def again(seq_id: int, kv_len: int, *tokens: int) -> SequencePlan:
    k = len(tokens) - 1
    return SequencePlan(seq_id, 1, kv_len, tokens, block_keep=2, num_proposal_tokens=k, logits_rows=tuple(range(k + 1)))


def test_a_late_grammar_keeps_only_its_own_sequence_waiting(run: Any, maker: Maker) -> None:
    bound, free = run(first(1, BOUND), first(2, FREE))
    assert (bound.error, bound.committed) == (SequenceError.NOT_READY, ())
    assert free.committed == (6,)
    bound, free = run(again(1, 1, 5), again(2, 2, 6))
    assert (bound.error, free.committed) == (SequenceError.NOT_READY, (7,))
    matcher = EvenNumbers()
    maker.futures[0].set_result(matcher)
    (bound,) = run(again(1, 1, 5))
    assert bound.committed == (6,)
    assert matcher.asked == [([], [])]
    (bound,) = run(again(1, 2, 6, 8, 3, 4))
    assert matcher.asked[-1] == ([6], [8, 3, 4])
    assert (bound.num_accepted, bound.committed) == (1, (8, 0))  # 9 is odd, and of equal ones the first is taken
    assert len(maker.futures) == 1


def test_a_step_waits_for_a_grammar_where_nobody_else_waits(
    run: Any, maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_module, "GRAMMAR_PATIENCE_S", 200.0)
    threading.Timer(0.05, lambda: maker.futures[0].set_result(EvenNumbers())).start()
    (bound,) = run(first(1, BOUND))
    assert bound.committed == (6,)
    started = time.monotonic()
    assert run(first(2, BOUND), first(3, FREE))[0].error is SequenceError.NOT_READY
    assert time.monotonic() - started < 100


def test_a_chunk_without_logits_asks_nothing(run: Any, maker: Maker) -> None:
    (bound,) = run(replace(first(1, BOUND), logits_rows=()))
    assert (bound.error, bound.committed) == (None, ())
    assert len(maker.futures) == 1  # but it is being compiled


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InvalidRequest("sampling.grammar.regex", "even", "one that compiles"), "sampling.grammar.regex is 'even'"),
        (MemoryError("no memory"), "the grammar failed: no memory"),
    ],
)
def test_a_grammar_that_fails_concerns_its_sequence(run: Any, maker: Maker, error: Exception, message: str) -> None:
    run(first(1, BOUND), first(2, FREE))
    maker.futures[0].set_exception(error)
    bound, free = run(again(1, 1, 5), again(2, 2, 6))
    assert bound.error is SequenceError.INVALID_PLAN
    assert message in bound.error_message
    assert free.committed == (7,)


def test_an_output_that_the_grammar_does_not_know_fails_its_sequence(run: Any, maker: Maker) -> None:
    run(first(1, BOUND), first(2, FREE))
    maker.futures[0].set_result(EvenNumbers())
    bound, free = run(again(1, 2, 3), again(2, 2, 6))
    assert bound.error is SequenceError.INVALID_PLAN
    assert "is odd" in bound.error_message
    assert free.committed == (7,)


def test_forced_tokens_are_counted(run: Any, maker: Maker) -> None:
    """Behind 6 only 8 is left, and the model wants 7."""
    run(first(1, BOUND))
    maker.futures[0].set_result(EvenNumbers())
    (bound,) = run(again(1, 1, 5, 6, 8, 0))
    assert bound.committed == (6, 8, 0, 0)
    assert (bound.num_forced_tokens, bound.num_forced_accepted) == (1, 1)


def test_a_sequence_that_starts_anew_gets_a_matcher_of_its_own(run: Any, maker: Maker) -> None:
    run(first(1, BOUND))
    maker.futures[0].set_result(EvenNumbers())
    assert run(first(1, BOUND))[0].error is SequenceError.NOT_READY  # its second matcher is late
    run(released=(1,))
    assert run(replace(first(1, FREE), generation=2))[0].committed == (6,)
    assert len(maker.futures) == 2


def test_making_matchers_takes_a_thread_only_where_something_is_compiled() -> None:
    model = Path(__file__).parents[3] / "models" / "tiny" / "target"
    maker = MatcherMaker(GrammarCompiler(model, 1500, [0]))
    grammar = Grammar(GrammarKind.REGEX, "yes|no")
    one = maker.start(grammar).result(timeout=30)
    second = maker.start(grammar)
    assert second.done()
    assert second.result() is not one
    broken = maker.start(Grammar(GrammarKind.REGEX, "("))
    with pytest.raises(InvalidRequest):
        broken.result(timeout=30)
