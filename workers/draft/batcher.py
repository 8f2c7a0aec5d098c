"""The schedule of a draft worker: which rows of which sessions run in the next step. No threads, network or tensors.

Every step takes one row to draw from or a chunk to catch up with from each session, those that have waited longest
first, within ``max_num_batched_tokens`` rows. Beside sessions that draft, those that catch up share ``catch_up_rows``
of them, so that a long prompt does not hold up the proposals of the others. A session that has proposed rests until the
next commit.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from outrider.core.block_pool import BlockPool
from outrider.core.proposal import Proposal
from outrider.workers.draft import messages, sessions
from outrider.workers.draft.messages import Address, Event, EvictionReason, NeedTokens
from outrider.workers.draft.sessions import DraftSession
from outrider.workers.draft.times import DraftTimes
from outrider.workers.drafters.base import Drafted, Drafter, DraftRows, Draw
from outrider.workers.matchers import MatcherMaker

logger = logging.getLogger(__name__)

# Rounds in a row that a session's own rows may be not finite.
MAX_INVALID_ROUNDS = 3


class Batcher:
    """Sessions, their blocks and their steps. ``handle`` and ``step`` leave answers that ``take_events`` returns.

    A session of ``capacity`` tokens or more is evicted with CONTEXT_FULL: positions of the model's context, or of the
    whole cache where that is smaller. Where blocks run out, the session that was opened last gives way.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        max_num_batched_tokens: int,
        max_num_tokens: int,
        catch_up_rows: int = 32,
        clock: Callable[[], float] = time.perf_counter,
        matcher_maker: MatcherMaker | None = None,
        on_traced_proposal: Callable[[DraftSession, Proposal], None] | None = None,
    ) -> None:
        """``matcher_maker`` None: sessions draft without their grammars. ``on_traced_proposal`` is told of proposals
        for requests that are traced.
        """
        self.pool = BlockPool(drafter.num_blocks, drafter.block_size)
        self.capacity = min(drafter.max_model_len, drafter.num_blocks * drafter.block_size)
        self.max_num_tokens = max_num_tokens
        self.sessions: dict[tuple[int, int], DraftSession] = {}
        self.num_steps = 0
        self.num_opened = 0
        self.num_proposals = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.step_ms: deque[float] = deque(maxlen=512)
        self.times = DraftTimes()
        self._drafter = drafter
        self._max_rows = max_num_batched_tokens
        self._catch_up_rows = catch_up_rows
        self._clock = clock
        self._matcher_maker = matcher_maker
        self._on_traced_proposal = on_traced_proposal
        self._events: list[Event] = []
        self._epochs: dict[int, int] = {}  # the highest epoch that each stream has named

    # -- messages ------------------------------------------------------------------------------------------------------

    def handle(self, command: messages.Command) -> None:
        """Take in a message. Stale ones, of an older epoch or generation than the session's, change nothing."""
        if isinstance(command, messages.CloseStream):
            for key in [key for key in self.sessions if key[0] == command.stream]:
                self._drop(self.sessions[key])
            self._epochs.pop(command.stream, None)
            return
        address = command.address
        session = self.sessions.get(address.key)
        newest_epoch = self._epochs.get(address.stream, 0)
        self._epochs[address.stream] = max(address.epoch, newest_epoch)
        if address.epoch < newest_epoch or (session is not None and _version(address) < _version(session.address)):
            logger.debug("dropped a stale message for session %s", address)
        elif isinstance(command, messages.Open):
            self._open(command)
        elif isinstance(command, messages.Refuse):
            self._refuse(address, command.why)
        elif session is None:
            logger.debug("dropped a message for session %s, which is not open", address)
        elif isinstance(command, messages.Close):
            self._drop(session)
        elif address.generation == session.address.generation:
            self._commit(session, command)

    def take_events(self) -> list[Event]:
        """The answers since the last call, in order."""
        events, self._events = self._events, []
        return events

    def evict_all(self, reason: EvictionReason) -> None:
        for session in list(self.sessions.values()):
            self._evict(session, reason)

    def _open(self, command: messages.Open) -> None:
        address = command.address
        if address.key in self.sessions:
            self._drop(self.sessions[address.key])
        self.num_opened += 1
        sampling = sessions.applicable(command.sampling, self._drafter.vocab_size)
        session = DraftSession(
            address,
            sampling,
            self._clip(command.num_tokens),
            opened=self.num_opened,
            traceparent=command.traceparent,
        )
        if sampling.grammar is not None and self._matcher_maker is not None:
            session.matcher = self._matcher_maker.start(sampling.grammar)
        self.sessions[address.key] = session
        if not command.tokens and command.prefix_len > 0:
            self._ask(session, 0)
        elif command.prefix_len not in (0, len(command.tokens)):
            self._refuse(address, f"prefix_len is {command.prefix_len}, but {len(command.tokens)} tokens came")
        else:
            # prefix_len 0 beside tokens: the scheduler names no hash either.
            self._apply(session, 0, command.tokens, command.prefix_hash if command.prefix_len else None)

    def _commit(self, session: DraftSession, command: messages.Commit) -> None:
        session.address = replace(session.address, epoch=command.address.epoch)
        session.num_tokens = self._clip(command.num_tokens)
        session.traceparent = command.traceparent
        self.num_accepted_tokens += command.num_accepted
        self._apply(session, command.base_len, command.tokens, command.hash)

    def _apply(self, session: DraftSession, base_len: int, tokens: tuple[int, ...], text_hash: int | None) -> None:
        vocab_size = self._drafter.vocab_size
        if any(token >= vocab_size for token in tokens):
            self._refuse(session.address, f"tokens hold {max(tokens)}, but the vocabulary has {vocab_size}")
            return
        needed_from = sessions.commit(session, base_len, tokens, text_hash)
        if needed_from is not None:
            if base_len == 0:
                # All tokens were there and still do not give the hash: asking again would go on forever.
                self._refuse(session.address, "hash is not that of the tokens")
            else:
                self._ask(session, needed_from)
            return
        session.asked_from = None
        session.proposal_due = session.num_tokens > 0
        session.committed_at = self._clock()
        self._free_beyond_text(session)
        if session.num_committed >= self.capacity:
            self._evict(session, EvictionReason.CONTEXT_FULL)
        elif self._reserve(session, session.num_committed):
            self._propose_if_ready(session)

    def _ask(self, session: DraftSession, from_len: int) -> None:
        if session.asked_from is None or from_len < session.asked_from:
            session.asked_from = from_len
            self._events.append(Event(session.address, NeedTokens(from_len)))

    # -- steps ---------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return any(self._missing(session) > 0 for session in self.sessions.values())

    def step(self) -> int:
        """Run one step, if there is work. Returns the number of rows that ran."""
        planned = self._plan()
        if not planned:
            return 0
        started = self._clock()
        results = self._drafter.run([rows for _, rows in planned])
        for (session, rows), result in zip(planned, results, strict=True):
            session.last_step = self.num_steps
            self._take(session, rows, result)
        self.num_steps += 1
        seconds, num_rows = self._clock() - started, sum(len(rows.tokens) for _, rows in planned)
        self.step_ms.append(1e3 * seconds)
        self.times.stepped(seconds, num_rows)
        return num_rows

    def _plan(self) -> list[tuple[DraftSession, DraftRows]]:
        waiting = [session for session in self.sessions.values() if self._missing(session) > 0]
        waiting.sort(key=lambda session: (session.last_step, session.opened))
        budget = self._max_rows
        # Sessions that rest count too: their next commit must not find a long chunk under way.
        drafting = any(s.num_tokens > 0 and not self._is_behind(s) for s in self.sessions.values())
        catch_up = min(budget, self._catch_up_rows) if drafting else budget
        counts: dict[tuple[int, int], int] = {}
        for session in waiting:
            if session.address.key not in self.sessions:
                continue  # evicted for a session before it
            count = min(self._missing(session), catch_up if self._is_behind(session) else budget)
            if count == 0 or not self._reserve(session, session.kv_len + count):
                continue
            if self._is_behind(session):
                catch_up -= count
            budget -= count
            catch_up = min(catch_up, budget)
            counts[session.address.key] = count
            if budget == 0 or len(counts) == self._drafter.max_num_seqs:
                break
        # Sessions that were planned may have been evicted since.
        alive = [(self.sessions[key], count) for key, count in counts.items() if key in self.sessions]
        return [(session, self._rows(session, count)) for session, count in alive]

    def _rows(self, session: DraftSession, count: int) -> DraftRows:
        text = session.text
        end = session.kv_len + count
        draw = None
        if end == len(text) and session.proposal_due:
            draw = Draw(
                session.sampling,
                position=end,
                prefix_hash=text.hashes[end],
                text=text.tokens,
                allowed=sessions.allowed(session),
            )
        return DraftRows(
            tokens=text.tokens[session.kv_len : end],
            start=session.kv_len,
            block_table=tuple(session.blocks),
            draw=draw,
        )

    def _take(self, session: DraftSession, rows: DraftRows, result: Drafted) -> None:
        if rows.draw is None:
            session.kv_len += len(rows.tokens)
            return
        if result.tokens:
            session.kv_len += len(rows.tokens)
            sessions.extend(session, result.tokens, result.rows)
            self._propose_if_ready(session)
            return
        # Nothing was drawn, so the proposal ends here; the rows run again if a commit wants more.
        session.invalid_rounds += result.invalid
        # Tokens that were drawn are offered whatever their successors' row holds: it depends on what they are.
        if session.invalid_rounds >= MAX_INVALID_ROUNDS and session.num_drafted == 0:
            self._evict(session, EvictionReason.INVALID_LOGITS)
            return
        self._propose(session, session.num_drafted)

    def _propose_if_ready(self, session: DraftSession) -> None:
        wanted = sessions.num_wanted(session, self.capacity)
        if session.proposal_due and session.num_drafted >= wanted:
            session.invalid_rounds = 0
            self._propose(session, wanted)

    def _propose(self, session: DraftSession, length: int) -> None:
        session.proposal_due = False
        if length == 0:
            return
        self.num_proposals += 1
        self.num_draft_tokens += length
        draft_s = self._clock() - session.committed_at
        self.times.proposal.observe(draft_s)
        proposal = sessions.make_proposal(session, self.num_proposals, length, self._drafter.name, 1e3 * draft_s)
        self._events.append(Event(session.address, proposal))
        if session.traceparent and self._on_traced_proposal is not None:
            self._on_traced_proposal(session, proposal)

    def _missing(self, session: DraftSession) -> int:
        return sessions.num_missing(session, self.capacity)

    def _is_behind(self, session: DraftSession) -> bool:
        """Whether the session catches up, rather than drafts: it lacks more than a round commits."""
        return self._missing(session) > self.max_num_tokens + 1

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _reserve(self, session: DraftSession, num_positions: int) -> bool:
        """Give a session blocks for that many positions; False if it was evicted instead."""
        count = self.pool.blocks_for(num_positions) - len(session.blocks)
        if count <= 0:
            return True
        younger = [other for other in self.sessions.values() if other.opened > session.opened and other.blocks]
        younger.sort(key=lambda other: other.opened)
        if self.pool.num_free + sum(len(other.blocks) for other in younger) < count:
            self._evict(session, EvictionReason.NO_MEMORY)
            return False
        while not self.pool.can_allocate(count):
            self._evict(younger.pop(), EvictionReason.NO_MEMORY)
        session.blocks += self.pool.allocate(count)
        return True

    def _free_beyond_text(self, session: DraftSession) -> None:
        keep = self.pool.blocks_for(len(session.text))
        self.pool.release(session.blocks[keep:])
        del session.blocks[keep:]

    def _refuse(self, address: Address, why: str) -> None:
        session, stream, known = address.session_id, address.stream, {"epoch": address.epoch}
        logger.warning("session %d of stream %d cannot be served: %s", session, stream, why, extra=known)
        if address.key in self.sessions:
            self._drop(self.sessions[address.key])
        self.times.evicted(EvictionReason.UNSPECIFIED)
        self._events.append(Event(address, EvictionReason.UNSPECIFIED))

    def _evict(self, session: DraftSession, reason: EvictionReason) -> None:
        self._drop(session)
        self.times.evicted(reason)
        self._events.append(Event(session.address, reason))

    def _drop(self, session: DraftSession) -> None:
        del self.sessions[session.address.key]
        self.pool.release(session.blocks)
        session.blocks = []

    def _clip(self, num_tokens: int) -> int:
        return min(num_tokens, self.max_num_tokens)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every block is free or held by the one session that counts it."""
        self.pool.check_integrity(session.blocks for session in self.sessions.values())
        for session in self.sessions.values():
            fault = sessions.session_fault(session, self.pool.block_size)
            if fault is not None:
                raise AssertionError(f"session {session.address}: {fault}")


def _version(address: Address) -> tuple[int, int]:
    return address.epoch, address.generation
