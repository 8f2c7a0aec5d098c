"""Which rows run in a step: slots, token budget and blocks, without a thought for why.

Requests run in the order of their admission. Every decoding request gets its row first, proposals come second, prompts
third and new requests last. Blocks that nobody holds are found again by their text (``sharing.py``) until they are
needed. If blocks run out, the request admitted last gives up its own and is computed anew later, as far as its blocks
are not found again (its committed tokens are then its prompt), so the oldest one always goes on and every request ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from outrider.core.block_pool import BlockPool
from outrider.core.plan import GroupInfo
from outrider.core.proposal import Proposal, shorten
from outrider.router.hearing import Heard
from outrider.router.requests import Request
from outrider.router.rounds import prepared
from outrider.router.sharing import PrefixCache
from outrider.router.step_rows import Rows, RowsLeft, sequence_plan

PREFILL_SHARE = 4  # proposals leave one row in this many to prompts that wait
MAX_SCORED_ROWS = 128  # of a step: each is a row of logits in memory, as wide as the vocabulary

Propose = Callable[[Request], Heard | None]
# Rows that do not enter a prompt, requests that enter one, and requests that decode -> the most rows of prompts.
LimitPrompts = Callable[[int, int, int], int]


class Batcher:
    """The requests that wait and run, and the blocks of those that run.

    A request keeps its blocks while a step that writes them is in flight; the caller sees to that by calling
    ``release`` only between steps.

    Attributes:
        num_queried_tokens: tokens of the texts that were looked up in the prefix cache.
        num_hit_tokens: those of them that were found there.
    """

    def __init__(self, info: GroupInfo, max_num_seqs: int, *, enable_prefix_caching: bool = True) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._enable_prefix_caching = enable_prefix_caching
        self._next_seq_id = 1
        self.reset(info, max_num_seqs)

    def limit(self, max_num_seqs: int) -> None:
        """Let at most so many requests run; those that run already go on."""
        # Each decoding request takes part in each step with a row at least.
        self.max_num_seqs = min(max_num_seqs, self.budget, self._max_planned_seqs)

    def reset(self, info: GroupInfo, max_num_seqs: int) -> None:
        """Start with an empty cache; what ran waits again, in its order, before what waited."""
        for request in self.running:
            _forget_cache(request)
        self.waiting.extendleft(reversed(self.running))
        self.running = []
        self.pool = BlockPool(info.num_blocks, info.block_size)
        self._prefixes = PrefixCache(self.pool, enabled=self._enable_prefix_caching)
        self.budget = info.max_num_batched_tokens
        self._max_planned_seqs = info.max_num_seqs
        self.limit(max_num_seqs)
        self._released: list[int] = []

    @property
    def num_pool_positions(self) -> int:
        return self.pool.num_blocks * self.pool.block_size

    def take_released(self) -> tuple[int, ...]:
        """Sequences that the group may forget, each told once."""
        released, self._released = tuple(self._released), []
        return released

    def remove(self, request: Request) -> None:
        """Take a request that has ended out of queue or running ones; its blocks stay until ``release``."""
        if request.seq_id:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def release(self, request: Request) -> None:
        """Free the blocks of a request that no step uses."""
        if request.seq_id:
            self._released.append(request.seq_id)
            # The end of a text is of less use than its beginning, without which it is not found: it is forgotten first.
            self.pool.release(reversed(request.blocks))
            _forget_cache(request)

    @property
    def num_joining(self) -> int:
        """Requests of the queue that there are places for."""
        return max(0, min(len(self.waiting), self.max_num_seqs - len(self.running)))

    def can_admit(self) -> bool:
        """Whether a request of the queue could join the next step."""
        return self._admissible() is not None

    def build(
        self, propose: Propose, resting: Sequence[Request] = (), limit_prompts: LimitPrompts | None = None
    ) -> list[Rows]:
        """The rows of the next step, at most ``budget``; moves requests between queue and running ones.

        ``propose`` gives the proposal that continues a request's text, of any length, or None. ``resting`` requests
        would rather stay out of it; they do unless nobody else takes part. ``limit_prompts`` gives the most rows of
        prompts beside requests that decode.
        """
        suspect = next((request for request in (*self.running, *self.waiting) if request.runs_alone), None)
        if suspect is not None and (alone := self._build_alone(suspect, propose)):
            return alone
        if not self.can_admit() and all(request in resting for request in self.running):
            resting = ()
        for request in self.running:
            request.sat_out = request in resting
        decoding = [request for request in self.running if request.num_missing == 1 and not request.sat_out]
        # Growing for one request may preempt a later one, which then has no sequence id.
        decoding = [request for request in decoding if request.seq_id and self._grow(request)]
        prompts = [request for request in self.running if request.num_missing > 1]
        left = RowsLeft(self.budget - len(decoding), MAX_SCORED_ROWS)
        wanted = sum(request.num_missing for request in prompts)
        head = self._admissible()
        wanted += len(head.text) - len(self._prefixes.find(head)) * self.pool.block_size if head is not None else 0
        spare = left.rows - min(wanted, left.rows // PREFILL_SHARE)
        rows = []
        for index, request in enumerate(decoding):
            built = self._rows(request, 1, propose, spare // (len(decoding) - index))
            spare -= built.plan.num_proposal_tokens
            left.rows -= built.plan.num_proposal_tokens
            rows.append(built)
        if limit_prompts is not None and (prompts or head is not None) and (decoding or resting):
            entering = len(prompts) + self.num_joining
            num_decoding = len(self.running) - len(prompts)
            left.rows = min(left.rows, limit_prompts(self.budget - left.rows, entering, num_decoding))
        for request in prompts:
            rows += self._prompt_rows(request, propose, left)
        return [*rows, *self.admit(propose, left)]

    def admit(self, propose: Propose, left: RowsLeft) -> list[Rows]:
        """Let requests of the queue begin, as long as places, blocks and rows are left; returns their first rows."""
        rows = []
        while left.rows > 0 and (head := self._admissible(left)) is not None:
            self._admit(head)
            rows += self._prompt_rows(head, propose, left)
        return rows

    def hold_for(self, positions: Mapping[Request, int]) -> bool:
        """Get running requests the blocks for so many positions each; False, and none does, if too few are free."""
        missing = {r: max(0, self.pool.blocks_for(count) - len(r.blocks)) for r, count in positions.items()}
        if not self.pool.can_allocate(sum(missing.values())):
            return False
        for request, count in missing.items():
            request.blocks.extend(self.pool.allocate(count))
        return True

    def computed(self, request: Request, num_rows: int, num_accepted: int) -> None:
        """A step computed ``num_rows`` rows of text and ``num_accepted`` proposed tokens became text.

        Blocks that held only rejected rows are free again.
        """
        before = request.kv_len
        request.kv_len += num_rows + num_accepted
        self._prefixes.computed(request, before)
        keep = self.pool.blocks_for(len(request.text))
        self.pool.release(request.blocks[keep:])
        del request.blocks[keep:]
        request.blocks_told = min(request.blocks_told, len(request.blocks))

    def check_integrity(self, in_flight: Iterable[Request]) -> None:
        """Raise ``AssertionError`` unless the books balance; ``in_flight`` have ended but still hold blocks."""
        self.pool.check_integrity([request.blocks for request in (*self.running, *in_flight)])
        self._prefixes.check_integrity(self.running)
        if len(self.running) > min(self.budget, self._max_planned_seqs):
            raise AssertionError(f"{len(self.running)} requests run, more than one step can hold")
        for request in self.waiting:
            if request.blocks or request.seq_id or request.kv_len or request.blocks_told or request.is_told:
                raise AssertionError(f"{request.new.request_id} waits and holds a part of the cache")
        for request in self.running:
            if not request.seq_id or request.ended:
                raise AssertionError(f"{request.new.request_id} runs without a sequence, or after its end")
            if not 0 <= request.kv_len < len(request.text) or request.blocks_told > len(request.blocks):
                raise AssertionError(f"{request.new.request_id} has {request.kv_len} positions in the cache")
            if len(request.blocks) < self.pool.blocks_for(request.kv_len):
                raise AssertionError(f"{request.new.request_id} has keys and values without blocks")

    def _build_alone(self, request: Request, propose: Propose) -> list[Rows]:
        """A step with nobody else in it; empty if others must go on first to make room."""
        if not request.seq_id:
            if self._prefixes.must_wait(request) or not self._fits(request):
                return []
            self._admit(request)
        elif not self._grow(request):
            return []
        return self._prompt_rows(request, propose, RowsLeft(self.budget, MAX_SCORED_ROWS))

    def _admissible(self, left: RowsLeft | None = None) -> Request | None:
        """The request of the queue that could join the next step.

        It is the first that need not wait, be it for a choice that computes the prompt of both or, in a step that has
        no more than ``left``, for others' scored rows. While one that is to run alone waits for room, none may.
        """
        if any(request.runs_alone for request in self.waiting):
            return None
        ready = (request for request in self.waiting if not self._prefixes.must_wait(request))
        head = next((request for request in ready if left is None or left.chunk(request)), None)
        return head if head is not None and self._fits(head) else None

    def _fits(self, request: Request) -> bool:
        """Whether a place and blocks are free for a request of the queue."""
        if len(self.running) >= self.max_num_seqs:
            return False
        # One block stays for each running request, or it might preempt the new one in the very next step.
        found = self._prefixes.find(request)
        wanted = self.pool.blocks_for(len(request.text)) - len(found) + len(self.running)
        return self.pool.can_allocate(wanted, beside=found)

    def _grow(self, request: Request) -> bool:
        """Get the blocks for all committed tokens, from others if need be; False: it had to go itself."""
        missing = self.pool.blocks_for(len(request.text)) - len(request.blocks)
        while not self.pool.can_allocate(missing):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.blocks.extend(self.pool.allocate(max(0, missing)))
        return True

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self.running.remove(request)
        self.release(request)
        self.waiting.appendleft(request)

    def _admit(self, request: Request) -> None:
        self.waiting.remove(request)
        found = self._prefixes.find(request)
        self.pool.hold(found)
        if not request.num_unscored:
            self.num_queried_tokens += len(request.text)
            self.num_hit_tokens += len(found) * self.pool.block_size
        request.seq_id = self._next_seq_id
        self._next_seq_id += 1
        request.blocks = [*found, *self.pool.allocate(self.pool.blocks_for(len(request.text)) - len(found))]
        request.kv_len = len(found) * self.pool.block_size
        if (
            request.family.cached_prompt_tokens is None
        ):  # later finds are choices' of one another, or after a preemption
            request.family.cached_prompt_tokens = request.kv_len
        self.running.append(request)

    def _prompt_rows(self, request: Request, propose: Propose, left: RowsLeft) -> list[Rows]:
        """The next chunk of a prompt, if there is room for it, followed by a proposal if it is the last one."""
        chunk = left.chunk(request)
        if chunk == 0:
            return []
        built = self._rows(request, chunk, propose, left.rows - chunk)
        left.rows -= len(built.plan.tokens)
        left.scored -= len(built.plan.scored_tokens)
        return [built]

    def _rows(self, request: Request, num_text_rows: int, propose: Propose, spare: int) -> Rows:
        """Rows for ``num_text_rows`` tokens of the text and, at its end, for at most ``spare`` proposed tokens."""
        is_last = num_text_rows == request.num_missing
        heard = propose(request) if is_last and spare > 0 else None
        proposal = self._fitting(request, heard.proposal, spare) if heard is not None else None
        plan = sequence_plan(request, num_text_rows, proposal)
        request.is_told = True
        request.blocks_told = len(request.blocks)
        return Rows(request, plan, proposal, heard.draft_id if heard is not None else None)

    def _fitting(self, request: Request, proposal: Proposal, spare: int) -> Proposal | None:
        """The part of a proposal that text, budget and free blocks have room for, with its blocks allocated.

        Its length depends on lengths alone, never on what is proposed: rejection would be bent otherwise.
        """
        length = len(request.text)
        free = (len(request.blocks) + self.pool.num_free) * self.pool.block_size - length
        count = min(len(proposal.tokens), request.num_useful_proposals, spare, free)
        if count <= 0:
            return None
        missing = self.pool.blocks_for(length + count) - len(request.blocks)
        request.blocks.extend(self.pool.allocate(max(0, missing)))
        return prepared(shorten(proposal, count), request.new.sampling.verifier)


def _forget_cache(request: Request) -> None:
    request.seq_id = 0
    request.kv_len = 0
    request.blocks = []
    request.blocks_told = 0
    request.is_told = False
