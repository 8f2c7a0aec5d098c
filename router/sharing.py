"""Beginnings of texts that were computed before: found by their hashes, block by block, instead of computed again.

Only full blocks whose keys and values are all of committed tokens are entered, so a block that holds rejected rows
never is (``computed`` looks at ``kv_len``, which counts what was committed). A request takes over whole blocks, but
never its last token, which it computes for itself to get its first row. Nobody writes into such a block.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from outrider.core.block_pool import BlockPool
from outrider.router.requests import Request


class PrefixCache:
    """Names blocks after the text up to their ends, and finds them.

    With ``enabled`` unset only the choices of one request find each other's blocks.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool) -> None:
        self._pool = pool
        self._enabled = enabled

    def find(self, request: Request) -> list[int]:
        """Blocks that hold the longest known beginning of the text of a request that begins; the caller holds them."""
        if request.num_unscored:
            return []  # rows that are to be scored must be computed
        return self._pool.find(self._names(request, 0, len(request.text) - 1))

    def must_wait(self, request: Request) -> bool:
        """Whether another choice is computing what this one could share: it had better begin when that is done."""
        length, others = request.prompt_len - 1, request.family.members
        wanted = length // self._pool.block_size
        if len(others) == 1 or wanted == 0 or request.num_unscored:
            return False
        if not any(other.seq_id and other.kv_len < wanted * self._pool.block_size for other in others.values()):
            return False
        return len(self._pool.find(self._names(request, 0, length))) < wanted

    def computed(self, request: Request, kv_len_before: int) -> None:
        """Keys and values of a running request are valid up to its ``kv_len`` now."""
        names = self._names(request, kv_len_before, request.kv_len)
        for index, name in enumerate(names, kv_len_before // self._pool.block_size):
            self._pool.name(request.blocks[index], name)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise ``AssertionError`` if a block that others may read lies within reach of a write."""
        for request in requests:
            if self._pool.num_shared(request.blocks[request.kv_len // self._pool.block_size :]):
                raise AssertionError(f"{request.new.request_id} writes into a block that another one may read")

    def _names(self, request: Request, start: int, end: int) -> Iterator[Hashable]:
        """Names of the blocks that are full at ``end`` positions and were not at ``start``."""
        size = self._pool.block_size
        for index in range(start // size, end // size):
            prefix_hash = request.text.hashes[(index + 1) * size]
            yield prefix_hash if self._enabled else (request.family, prefix_hash)
