"""Stand-ins for the parts of a cluster, for tests against Outrider without a model, a GPU or Ray.

::

    toy = ToyModel()                                   # next token = a hash of the prefix
    folder = write_toy_model(tmp_path)                 # a model folder with a tokenizer and no weights
    async with StandInTarget(toy) as target, StandInDraft(toy) as draft:
        target.address, draft.address                  # real gRPC servers of the protocol outrider.v1

A ``StandInTarget`` checks every plan as a real group would and remembers what was wrong in ``faults``.
"""

from outrider.testing.draft import StandInDraft
from outrider.testing.target import StandInTarget
from outrider.testing.toy import ToyModel, write_toy_model

__all__ = ["StandInDraft", "StandInTarget", "ToyModel", "write_toy_model"]
