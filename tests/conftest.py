"""What tests of several kinds share: a light cluster of real processes (``tests/support/outrider_testbed``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from outrider_testbed import Testbed

    bed = Testbed(tmp_path_factory.mktemp("testbed"))
    yield bed
    bed.close()
