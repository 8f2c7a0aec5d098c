"""Prompts that several choices of a request share: computed once, block by block the same memory.

Whole blocks of the prompt are shared, but for its last token, which each choice computes for itself to get its first
row. Nobody writes into a shared block: every choice goes on in blocks of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.core.block_pool import BlockPool
from outrider.router.families import Family
from outrider.router.requests import Request


class SharedPrompts:
    """Lends prompts to choices that wait.

    Blocks of a prompt are kept here from when one choice has computed it until the last that waited has begun, so that
    they outlive the choice that computed them. They are held like those of a request, and given up when memory is
    short.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._kept: dict[Family, list[int]] = {}

    def tables(self) -> list[list[int]]:
        """What is held."""
        return list(self._kept.values())

    def num_sharable(self, request: Request) -> int:
        """Positions of its prompt that a request may take from another choice."""
        if request.num_unscored:
            return 0  # rows that are to be scored must be computed
        return (request.prompt_len - 1) // self._pool.block_size * self._pool.block_size

    def must_wait(self, request: Request) -> bool:
        """Whether another choice is computing what this one could share: it had better begin when that is done."""
        length = self.num_sharable(request)
        if length == 0 or self._lent(request, length) is not None:
            return False
        return any(other.seq_id for other in request.family.members.values())

    def num_lent(self, request: Request) -> int:
        """Blocks that a waiting request would get if it began now."""
        length = self.num_sharable(request)
        return length // self._pool.block_size if length and self._lent(request, length) is not None else 0

    def lend(self, request: Request) -> list[int]:
        """The first ``num_lent`` blocks of the table of a request that begins; the caller releases them one day."""
        length = self.num_sharable(request)
        table = self._lent(request, length) if length else None
        return self._pool.fork(table, length) if table is not None else []

    def computed(self, request: Request, kv_len_before: int) -> None:
        """A request has computed more: keep its prompt if it is complete now and others wait for it."""
        length = (request.prompt_len - 1) // self._pool.block_size * self._pool.block_size
        if kv_len_before < length <= request.kv_len and _waiting(request.family) and request.family not in self._kept:
            self._kept[request.family] = self._pool.fork(request.blocks, length)

    def tidy(self, family: Family) -> None:
        """Keep nothing for a family of which nobody waits."""
        if family in self._kept and not _waiting(family):
            self._pool.release(self._kept.pop(family))

    def give_up(self, but: Family | None = None) -> bool:
        """Free blocks by giving up what was kept last, not that of ``but``; False if that would free none."""
        for family in reversed(self._kept):
            if family is not but and self._pool.num_freed_by(self._kept[family]):
                self._pool.release(self._kept.pop(family))
                return True
        return False

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise ``AssertionError`` if something is kept for nobody, or a shared block lies within reach of a write."""
        for family in self._kept:
            if not _waiting(family):
                raise AssertionError("a prompt is kept that nobody waits for")
        for request in requests:
            written = request.blocks[request.kv_len // self._pool.block_size :]
            if self._pool.num_freed_by(written) != len(written):
                raise AssertionError(f"{request.new.request_id} writes into a block that another one reads")

    def _lent(self, request: Request, length: int) -> Sequence[int] | None:
        """A table whose first ``length`` positions hold the request's prompt, or None."""
        kept = self._kept.get(request.family)
        if kept is not None:
            return kept
        others = request.family.members.values()
        return next((other.blocks for other in others if other.seq_id and other.kv_len >= length), None)


def _waiting(family: Family) -> list[Request]:
    return [request for request in family.members.values() if not request.seq_id]
