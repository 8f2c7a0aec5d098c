"""The draft workers of a cluster: connects to those in the registry, refuses those that do not fit, drops lost ones."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Protocol

from outrider.cluster.registry import Record, Registry
from outrider.core.errors import Unavailable
from outrider.core.plan import GroupInfo
from outrider.core.proposal import Proposal
from outrider.core.wire import proposal_from_wire
from outrider.router.draft_stream import DraftStream
from outrider.router.drafts import DraftEvent, DraftFacts, EvictionReason
from outrider.router.membership import follow_members
from outrider.router.streams import Refused
from outrider.v1 import draft_pb2

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 2.0


class DraftListener(Protocol):
    """Whoever schedules for the drafts."""

    def draft_joined(self, facts: DraftFacts) -> None: ...

    def draft_left(self, draft_id: str) -> None: ...

    def draft_proposed(self, draft_id: str, session_id: int, proposal: Proposal) -> None: ...

    def draft_evicted(self, draft_id: str, session_id: int, reason: EvictionReason) -> None: ...

    def draft_needs_tokens(self, draft_id: str, session_id: int, from_len: int) -> None: ...


@dataclass(eq=False)
class KnownDraft:
    """A draft worker of the registry.

    Attributes:
        state: "connecting", "ready", "refused: ..." or "lost: ...".
    """

    draft_id: str
    record: Record
    state: str = "connecting"
    drafter: str = ""
    stream: DraftStream | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class DraftPool:
    """Streams to all draft workers of the registry. ``run`` it as a task."""

    def __init__(
        self, registry: Registry, listener: DraftListener, *, scheduler_id: str, info: GroupInfo, poll_s: float
    ) -> None:
        self.drafts: dict[str, KnownDraft] = {}
        self.epoch = 0  # stamped on what is sent
        self._registry = registry
        self._listener = listener
        self._scheduler_id = scheduler_id
        self._info = info
        self._poll_s = poll_s

    def send(self, event: DraftEvent) -> None:
        """Queue one message; one to a draft that is gone is dropped, for its sessions are gone too."""
        draft = self.drafts.get(event.draft_id)
        if draft is not None and draft.stream is not None:
            draft.stream.send(event, self.epoch)

    async def run(self) -> None:
        """Follow the registry until cancelled."""
        try:
            async for records in follow_members(self._registry, "draft", self._poll_s):
                for draft_id in [known for known in self.drafts if records.get(known) != self.drafts[known].record]:
                    await self._drop(draft_id)
                for draft_id, record in records.items():
                    if draft_id not in self.drafts:
                        draft = self.drafts[draft_id] = KnownDraft(draft_id, record)
                        draft.task = asyncio.create_task(self._keep_connected(draft), name=f"draft {draft_id}")
        finally:
            for draft_id in list(self.drafts):
                await self._drop(draft_id)

    async def _drop(self, draft_id: str) -> None:
        draft = self.drafts.pop(draft_id)
        if draft.task is not None:
            draft.task.cancel()
            await asyncio.wait([draft.task])  # unlike awaiting it, this tells its cancellation from our own

    async def _keep_connected(self, draft: KnownDraft) -> None:
        delay = FIRST_RETRY_S
        while not draft.state.startswith("refused"):
            try:
                await self._converse(draft)
            except Refused as error:
                draft.state = f"refused: {error}"
                log.error("draft %s at %s is %s", draft.draft_id, draft.record["address"], draft.state)
                return
            except Unavailable as error:
                if draft.state == "ready":
                    delay = FIRST_RETRY_S
                log.warning("draft %s: %s", draft.draft_id, error)
                draft.state = f"lost: {error}"
            except Exception as error:
                log.exception("draft %s said something that cannot be handled", draft.draft_id)
                draft.state = f"lost: {error!r}"
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_RETRY_S)

    async def _converse(self, draft: KnownDraft) -> None:
        stream = DraftStream(str(draft.record["address"]))
        joined = False
        try:
            hello = await stream.hello(self._scheduler_id, self._info, self.epoch, HELLO_TIMEOUT_S)
            draft.drafter = hello.drafter
            if hello.tokenizer_fingerprint != self._info.tokenizer_fingerprint:
                draft.state = (
                    f"refused: its tokenizer {hello.tokenizer_fingerprint} is not the target's "
                    f"{self._info.tokenizer_fingerprint}; draft and target must share one"
                )
                log.error("draft %s at %s is %s", draft.draft_id, draft.record["address"], draft.state)
                return
            draft.stream, draft.state, joined = stream, "ready", True
            log.info("draft %s at %s joined: %s", draft.draft_id, draft.record["address"], hello.model)
            self._listener.draft_joined(
                DraftFacts(draft.draft_id, hello.drafter, hello.max_model_len, hello.max_num_tokens)
            )
            async for response in stream.responses():
                self._handle(draft.draft_id, response)
        finally:
            draft.stream = None
            if joined:
                self._listener.draft_left(draft.draft_id)
            await stream.close()

    def _handle(self, draft_id: str, response: draft_pb2.SessionResponse) -> None:
        match response.WhichOneof("body"):
            case "proposed":
                proposed = response.proposed
                self._listener.draft_proposed(draft_id, proposed.session_id, proposal_from_wire(proposed.proposal))
            case "evicted":
                evicted = response.evicted
                known = evicted.reason in EvictionReason.__members__.values()
                reason = EvictionReason(evicted.reason) if known else EvictionReason.UNSPECIFIED
                self._listener.draft_evicted(draft_id, evicted.session_id, reason)
            case "need_tokens":
                need = response.need_tokens
                self._listener.draft_needs_tokens(draft_id, need.session_id, need.from_len)
            case other:
                log.warning("draft %s sent %s, which has no meaning here", draft_id, other)
