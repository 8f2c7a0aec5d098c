"""The compiled kernels on each instruction set of the machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from outrider.kernels.cpu import Kernels, instruction_sets, load_kernels


@pytest.fixture(autouse=True)
def _two_threads_and_one_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["avx2", "avx512", "amx"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    found = load_kernels(request.param)
    if found is None:
        pytest.skip(f"this machine has {instruction_sets() or 'no kernels'}")
    return found
