"""What tests of several kinds share: a light cluster of real processes (``tests/support/outrider_testbed``)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

# Before numpy is imported. Matrices of tests are small: a second BLAS thread would only keep a core busy with waiting.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def warm_python() -> Iterator[Any]:
    """Starts processes of ranks and drafts that need not import torch any more."""
    from outrider_testbed import WarmPython

    python = WarmPython()
    yield python
    python.close()


@pytest.fixture(scope="session")
def testbed(tmp_path_factory: pytest.TempPathFactory, warm_python: Any) -> Iterator[Any]:
    from outrider_testbed import Testbed

    bed = Testbed(tmp_path_factory.mktemp("testbed"), warm_python)
    yield bed
    bed.close()
