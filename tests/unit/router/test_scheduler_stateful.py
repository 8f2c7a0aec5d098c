"""Whatever happens, each request's text is the one of plain decoding, and the books balance.

Catches, among others: a suffix kept after a rejection, stale keys and values, a block with rejected rows in the prefix
cache, blocks freed under a running step, results of an old request taken for a new one's, prompts chunked wrongly, a
request that never ends; and with steps planned ahead, a wrong guess of where the step before ends, or blocks that are
freed while the second step in flight still writes them.
"""

from __future__ import annotations

import dataclasses

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outrider.core.errors import Conflict, InvalidRequest, Overloaded
from outrider.core.grammar import Grammar, GrammarKind
from outrider.core.plan import StepResult
from outrider.core.sampling import Sampling, Verifier
from outrider.router import batch
from outrider.router.drafts import EvictionReason
from outrider.router.requests import FinishReason
from outrider.router.settings import SchedulerSettings

GRAMMAR = Grammar(GrammarKind.REGEX, "x*")  # the toy knows none, but the text must travel with it
SAMPLINGS = {
    Verifier.GREEDY: Sampling(temperature=0.0, verifier=Verifier.GREEDY),
    Verifier.COUPLED: Sampling(verifier=Verifier.COUPLED),
    Verifier.REJECTION: Sampling(verifier=Verifier.REJECTION),
}

BEGINNING = [7, 7, 7, 1, 2, 3, 4, 5, 6, 7, 8]
PROMPTS = st.builds(  # many begin alike
    lambda length, tail: BEGINNING[:length] + tail,
    st.integers(0, len(BEGINNING)),
    st.lists(st.integers(0, 22), min_size=1, max_size=14),
)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self, toy) -> None:
        super().__init__()
        self.toy = toy
        # Few blocks and rows: preemption, chunked prompts and shrunken proposals are the rule here.
        info = toy.group_info(num_blocks=12, block_size=3, max_num_batched_tokens=11, max_model_len=34)
        self.world = toy.World(info, SchedulerSettings(max_queue=4, max_num_seqs=5, num_speculative_tokens=3))
        self.generation = 0
        self.old_texts: dict[int, list[list[int]]] = {}
        self.old_results: list[StepResult] = []

    @initialize(
        prompts=st.lists(PROMPTS, min_size=2, max_size=5),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        lookup_lengths=st.sampled_from([None, (1, 1), (1, 3)]),
        plan_ahead=st.booleans(),
        with_draft=st.booleans(),
    )
    def begin(self, prompts, enable_prefix_caching, lookup_lengths, plan_ahead, with_draft) -> None:
        settings = dataclasses.replace(
            self.world.scheduler.settings,
            enable_prefix_caching=enable_prefix_caching,
            lookup_lengths=lookup_lengths,
            plan_ahead=plan_ahead,
        )
        self.world = self.toy.World(self.world.info, settings)
        if with_draft:
            self.world.join("x")
        self.generation += 1
        for request_id, prompt in zip("abcde", prompts, strict=False):
            self.world.add(request_id, prompt, generation=self.generation)
        self.world.step()

    @rule(
        request_id=st.sampled_from("abcdefg"),
        prompt=PROMPTS,
        max_tokens=st.none() | st.integers(1, 12),
        k=st.none() | st.integers(0, 6),
        eos=st.frozensets(st.integers(0, 22), max_size=1),
        stops=st.frozensets(st.integers(0, 22), max_size=1),
        verifier=st.sampled_from(sorted(SAMPLINGS)),
        timeout=st.none() | st.integers(1, 60),
        num_choices=st.sampled_from([1, 1, 2, 3, 4]),
        logprobs=st.sampled_from([None, None, 2]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        grammar=st.sampled_from([None, GRAMMAR]),
    )
    def add(
        self,
        request_id,
        prompt,
        max_tokens,
        k,
        eos,
        stops,
        verifier,
        timeout,
        num_choices,
        logprobs,
        prompt_logprobs,
        grammar,
    ) -> None:
        world = self.world
        self.generation += 1
        before = bool(self.running(request_id))
        try:
            world.add(
                request_id,
                prompt,
                generation=self.generation,
                max_tokens=max_tokens,
                num_speculative_tokens=k,
                eos_token_ids=eos,
                stop_token_ids=stops,
                sampling=dataclasses.replace(
                    SAMPLINGS[verifier], logprobs=logprobs, prompt_logprobs=prompt_logprobs, grammar=grammar
                ),
                num_choices=num_choices,
                deadline=None if timeout is None else world.now + timeout,
            )
        except Conflict:
            assert before
        except Overloaded:
            snapshot = world.scheduler.snapshot()
            assert snapshot.num_waiting + snapshot.num_running + num_choices > 9
        except InvalidRequest:
            raise AssertionError("every one of these requests fits") from None
        else:
            assert not before

    def running(self, request_id) -> list[str]:
        """The choices of a request that have not ended."""
        world = self.world
        return [name for name in world.requests if name.split("/")[0] == request_id and name not in world.ends]

    @rule(request_id=st.sampled_from("abcdefg"))
    def abort(self, request_id) -> None:
        commits = self.world.scheduler.abort(request_id, "no longer wanted", self.world.now)
        assert [c.request_id for c in commits] == [request_id] * len(self.running(request_id))
        assert all(commit.finish.reason is FinishReason.ABORT for commit in commits)
        self.world.take(commits)

    @rule(request_id=st.sampled_from("abcdefg"), choice=st.integers(0, 3))
    def abort_choice(self, request_id, choice) -> None:
        name = f"{request_id}/{choice}" if choice else request_id
        commits = self.world.scheduler.abort(request_id, "one of them", self.world.now, choice)
        assert len(commits) == (name in self.running(request_id))
        self.world.take(commits)

    @rule()
    def start(self) -> None:
        """A step, or while one runs the next one."""
        may = self.world.scheduler.num_in_flight < (2 if self.world.scheduler.settings.plan_ahead else 1)
        assert self.world.start() is None or may

    @precondition(lambda self: self.world.pending is not None)
    @rule(seconds=st.sampled_from([0.01, 1.0, 3.0]))
    def finish(self, seconds) -> None:
        self.world.now += seconds
        self.old_results.append(self.world.pending)
        self.world.finish()

    @precondition(lambda self: self.old_results)
    @rule(data=st.data())
    def old_result_again(self, data) -> None:
        result = data.draw(st.sampled_from(self.old_results))
        assert self.world.scheduler.complete(result, self.world.now) == []

    @rule(seconds=st.sampled_from([0.001, 0.3, 5.0]))
    def wait(self, seconds) -> None:
        self.world.now += seconds
        self.world.take(self.world.scheduler.expire(self.world.now))

    @rule(draft_id=st.sampled_from("xy"), max_model_len=st.sampled_from([8, 64]), max_num_tokens=st.integers(1, 8))
    def draft_joins(self, draft_id, max_model_len, max_num_tokens) -> None:
        self.world.join(draft_id, max_model_len=max_model_len, max_num_tokens=max_num_tokens)

    @precondition(lambda self: self.world.drafts)
    @rule(data=st.data())
    def draft_leaves(self, data) -> None:
        self.world.leave(data.draw(st.sampled_from(sorted(self.world.drafts))))

    def draw_session(self, data):
        sessions = [(d, s) for d, draft in sorted(self.world.drafts.items()) for s in sorted(draft.texts)]
        return data.draw(st.sampled_from(sessions)) if sessions else (None, None)

    @rule(seconds=st.sampled_from([0.5, 1.0]), wrong_from=st.sampled_from([None, 0, 1, 2, 3]))
    def round(self, seconds, wrong_from) -> None:
        """Every draft answers what it was asked, and a step runs."""
        world = self.world
        for draft_id, draft in world.drafts.items():
            for session_id, count in draft.asked.items():
                if count:
                    choice = draft.choices[session_id]
                    proposal = draft.propose(draft.texts[session_id], count, wrong_from, True, choice)
                    world.scheduler.draft_proposed(draft_id, session_id, proposal, world.now)
        if world.pending is not None:
            self.finish(seconds)
        else:
            world.step(seconds)

    @rule(data=st.data(), count=st.integers(0, 8), wrong_from=st.none() | st.integers(0, 4), rows=st.booleans())
    def draft_proposes(self, data, count, wrong_from, rows) -> None:
        draft_id, session_id = self.draw_session(data)
        if draft_id is None:
            return
        draft = self.world.drafts[draft_id]
        text = draft.texts[session_id]
        late = data.draw(st.integers(0, min(4, len(text))))
        proposal = draft.propose(text[: len(text) - late], count, wrong_from, rows, draft.choices[session_id])
        fault = data.draw(st.sampled_from([None, None, None, None, "hash", "token", "length", "tree"]))
        if fault == "hash":
            proposal = dataclasses.replace(proposal, base_hash=proposal.base_hash ^ 1)
        elif fault == "token":
            proposal = dataclasses.replace(proposal, tokens=(*proposal.tokens[1:], 23))
        elif fault == "length":
            proposal = dataclasses.replace(proposal, base_len=proposal.base_len + 1)
        elif fault == "tree":
            proposal = dataclasses.replace(proposal, parents=(-1,) * len(proposal.tokens))
        self.world.now += 0.001
        reason = self.world.scheduler.draft_proposed(draft_id, session_id, proposal, self.world.now)
        if fault in ("hash", "token", "length"):
            assert reason is not None
        self.world.deliver()

    @rule(data=st.data(), reason=st.sampled_from(EvictionReason))
    def draft_evicts(self, data, reason) -> None:
        draft_id, session_id = self.draw_session(data)
        if draft_id is not None:
            draft = self.world.drafts[draft_id]
            del draft.texts[session_id], draft.asked[session_id]
            self.world.scheduler.draft_evicted(draft_id, session_id, reason, self.world.now)

    @rule(data=st.data(), back=st.integers(0, 30))
    def draft_needs_tokens(self, data, back) -> None:
        draft_id, session_id = self.draw_session(data)
        if draft_id is not None:
            text = self.world.drafts[draft_id].texts[session_id]
            from_len = max(0, len(text) - back)
            del text[from_len:]
            self.world.scheduler.draft_needs_tokens(draft_id, session_id, from_len, self.world.now)
            self.world.deliver()

    @rule()
    def group_is_rebuilt(self) -> None:
        world = self.world
        self.old_results += world.results
        world.pending = None
        world.group = self.toy.ToyGroup(world.info)
        ends = world.take(world.scheduler.reset(world.scheduler.epoch + 1, world.info))
        assert all(end.finish.reason is FinishReason.ERROR for end in ends)

    @invariant()
    def books_balance(self) -> None:
        self.world.scheduler.check_integrity()

    def teardown(self) -> None:
        world = self.world
        while world.pending is not None:
            world.finish()
        unfinished = [r for i, r in world.requests.items() if i not in world.ends]
        # The oldest request goes on in every step: a row of its prompt or a token of its output.
        world.run_to_end(most=2 + 2 * sum(2 * world.info.max_model_len for _ in unfinished))
        assert set(world.ends) == set(world.requests)
        world.check_ends()


def test_text_is_that_of_plain_decoding(toy, monkeypatch) -> None:
    monkeypatch.setattr(batch, "MAX_SCORED_ROWS", 5)
    run_state_machine_as_test(
        lambda: SchedulerMachine(toy),
        settings=settings(
            max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
