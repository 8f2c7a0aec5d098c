"""The state of one session of a draft worker, and what commits and draws do to it.

A session's text is the committed tokens followed by drafted ones. Drafted tokens are kept as long as commits agree with
them. That is exact: keys, values and draws are functions of the tokens before them alone (a draw's noise is keyed by
position and, under rejection, by the prefix), so drafting them again would give the same. For the same reason a
proposal under way goes on after a commit that agrees with it. The first token that disagrees voids everything from it
on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from outrider.controls import by_name
from outrider.core.prefix import HashedTokens, hash_tokens
from outrider.core.proposal import Proposal, SparseRow
from outrider.core.sampling import Sampling
from outrider.grammar import GrammarError, Matcher
from outrider.workers.draft.messages import Address

logger = logging.getLogger(__name__)


@dataclass
class DraftSession:
    """Plain state.

    Attributes:
        opened: the order in which sessions were opened.
        num_tokens: drafted tokens that a proposal shall hold.
        text: committed tokens, then drafted ones.
        rows: the distribution that each drafted token was drawn from; empty unless the verifier needs them.
        kv_len: keys and values of ``text[:kv_len]`` are in the blocks. Always short of the text: the last token is left
            for the next draw, so that there is a row to draw from.
        asked_from: the draft lacks the tokens from there on and has asked for them.
        proposal_due: the scheduler waits for a proposal that continues the committed text.
        committed_at: when the last commit came, in seconds.
        last_step: the worker's step that last ran rows of it.
        invalid_rounds: rounds in a row whose proposal was cut by a row that is not finite.
        traceparent: the span that the next proposal's belongs to; empty where the request is not traced.
        matcher: follows the text through the sampling's grammar, once that is compiled; None without a grammar.
    """

    address: Address
    sampling: Sampling
    num_tokens: int
    opened: int
    text: HashedTokens = field(default_factory=HashedTokens)
    num_committed: int = 0
    rows: list[SparseRow] = field(default_factory=list)
    kv_len: int = 0
    blocks: list[int] = field(default_factory=list)
    asked_from: int | None = None
    proposal_due: bool = False
    committed_at: float = 0.0
    last_step: int = -1
    invalid_rounds: int = 0
    traceparent: str = ""
    matcher: Future[Matcher] | None = None

    @property
    def num_drafted(self) -> int:
        return len(self.text) - self.num_committed


def applicable(sampling: Sampling, vocab_size: int) -> Sampling:
    """The settings without the controls that this draft cannot apply: that costs acceptance, and never the session."""
    usable = tuple(
        (name, value)
        for name, value in sampling.controls
        if (control := by_name(name)) is not None and control.fault(value, vocab_size) is None
    )
    return sampling if usable == sampling.controls else replace(sampling, controls=usable)


def allowed(session: DraftSession) -> np.ndarray | None:
    """What the grammar allows behind the session's text, [vocab_size] bool; None where nobody can say.

    That is so without a grammar, until the grammar is compiled, for one that does not compile here, and behind drafted
    tokens that left it (which were drafted before it was compiled).
    """
    if session.matcher is None or not session.matcher.done() or session.matcher.exception() is not None:
        return None
    try:
        return session.matcher.result().allowed(session.text.tokens[session.sampling.prompt_len :])[0]
    except GrammarError as error:
        logger.debug("session %s drafts without its grammar: %s", session.address, error)
        return None


def commit(session: DraftSession, base_len: int, tokens: Sequence[int], text_hash: int | None) -> int | None:
    """Make the committed text ``text[:base_len] + tokens``; ``text_hash`` is its chained hash, or None if unknown.

    Returns None, or, where the commit does not fit what the session holds, the length from which tokens are needed;
    then nothing has changed. Afterwards ``kv_len`` covers nothing computed at or after a token that the commit lacks.
    """
    text = session.text
    if base_len > session.num_committed:
        return session.num_committed
    agreed = base_len + _common_prefix(text.tokens[base_len : base_len + len(tokens)], tokens)
    new_tokens = tokens[agreed - base_len :]
    if text_hash is not None and hash_tokens(new_tokens, text.hashes[agreed]) != text_hash:
        return 0  # the texts part somewhere below: no telling where
    length = base_len + len(tokens)
    if new_tokens or length < session.num_committed:
        text.truncate(agreed)
        text.extend(new_tokens)
        session.rows.clear()
        session.kv_len = min(session.kv_len, agreed, max(0, length - 1))
    else:
        del session.rows[: length - session.num_committed]
    session.num_committed = length
    return None


def extend(session: DraftSession, tokens: Sequence[int], rows: Sequence[SparseRow]) -> None:
    """Append drafted tokens."""
    session.text.extend(tokens)
    session.rows.extend(rows)


def num_wanted(session: DraftSession, capacity: int) -> int:
    """Drafted tokens that the next proposal shall hold: fewer where the draft's context of ``capacity`` tokens ends."""
    return max(0, min(session.num_tokens, capacity - session.num_committed))


def num_missing(session: DraftSession, capacity: int) -> int:
    """Rows to run before the session can draw its next token, or rest."""
    if session.asked_from is not None:
        return 0
    if session.proposal_due and session.num_drafted < num_wanted(session, capacity):
        return len(session.text) - session.kv_len
    return max(0, session.num_committed - 1 - session.kv_len)


def make_proposal(session: DraftSession, proposal_id: int, length: int, drafter: str, draft_ms: float) -> Proposal:
    """The first ``length`` drafted tokens; ``length`` must not depend on what the tokens are."""
    base = session.num_committed
    return Proposal(
        proposal_id=proposal_id,
        base_len=base,
        base_hash=session.text.hashes[base],
        tokens=tuple(session.text.tokens[base : base + length]),
        rows=tuple(session.rows[:length]),
        drafter=drafter,
        draft_ms=draft_ms,
    )


def session_fault(session: DraftSession, block_size: int) -> str | None:
    """What is inconsistent in a session, or None; for integrity checks."""
    if not 0 <= session.num_committed <= len(session.text):
        return f"{session.num_committed} tokens committed of {len(session.text)}"
    if not 0 <= session.kv_len <= max(0, len(session.text) - 1):
        return f"keys and values of {session.kv_len} positions, text of {len(session.text)}"
    if session.kv_len > len(session.blocks) * block_size:
        return f"keys and values of {session.kv_len} positions in {len(session.blocks)} blocks"
    if session.sampling.needs_draft_probs and len(session.rows) != session.num_drafted:
        return f"{len(session.rows)} rows for {session.num_drafted} drafted tokens"
    return None


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
