"""Work that leaves no threads behind."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def in_passing_thread(work: Callable[[], Result]) -> Result:
    """What ``work`` returns or raises, run in a thread that ends with it.

    OpenMP keeps a team of threads for every thread that ever computed, until that one ends. A model that was loaded in
    one thread and runs in another would have two teams: more threads than processors, so that libgomp no longer lets
    them wait for the next parallel part of a pass, but puts them to sleep before each, some hundred times a pass.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="passing") as executor:
        return executor.submit(work).result()
