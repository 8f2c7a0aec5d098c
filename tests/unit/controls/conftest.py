"""One thread: the matrices are small, and other work shares the machine."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
