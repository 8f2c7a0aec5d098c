"""``outrider profile --curves``: rows, contexts and batches each for itself, instead of all of their combinations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.v1 import admin_pb2

ROWS = (1, 2, 3, 5, 9, 13, 17)  # k from 0 to 16
CONTEXTS = (128, 512, 1024, 2048, 4000)
BATCHES = (1, 2, 4, 8, 16, 32)
FEW_ROWS = (1, 5)  # along contexts and batches: a plain step, and k = 4


def curves(whole: admin_pb2.ProfileRequest) -> list[admin_pb2.ProfileRequest]:
    """The profiles that take the place of one: each of its lists along the least of the others.

    Along contexts and batches there are one row and five, or as few of its own where it names some. Only the first
    measures drafts.
    """
    from outrider.v1 import admin_pb2

    rows, contexts = list(whole.rows) or list(ROWS), list(whole.contexts) or list(CONTEXTS)
    batches = list(whole.num_sequences) or list(BATCHES)
    few = [each for each in FEW_ROWS if each in rows] or [min(rows)]

    def one(rows: Sequence[int], contexts: Sequence[int], batches: Sequence[int]) -> admin_pb2.ProfileRequest:
        return admin_pb2.ProfileRequest(
            rows=rows, contexts=contexts, num_sequences=batches, num_runs=whole.num_runs, num_proposals=0
        )

    first = one(rows, [min(contexts)], [min(batches)])
    first.num_proposals = whole.num_proposals
    others = []
    if len(contexts) > 1:
        others.append(one(few, [each for each in contexts if each != min(contexts)], [min(batches)]))
    if len(batches) > 1:
        others.append(one(few, [min(contexts)], [each for each in batches if each != min(batches)]))
    return [first, *others]


def joined(results: Sequence[admin_pb2.ProfileResult]) -> admin_pb2.ProfileResult:
    """The first one, with the passes of all."""
    from outrider.v1 import admin_pb2

    whole = admin_pb2.ProfileResult()
    whole.CopyFrom(results[0])
    for result in results[1:]:
        whole.passes.extend(result.passes)
        whole.left_out.extend(result.left_out)
    return whole
