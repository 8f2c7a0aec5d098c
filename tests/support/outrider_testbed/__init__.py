"""A light cluster for tests: real Redis, target ranks, drafts and router, each a process of its own, without Ray.

The name is long on purpose: pytest puts ``tests/support`` on the path (``pythonpath`` in pyproject.toml).
"""

from outrider_testbed.cluster import Cluster
from outrider_testbed.oracle import Oracle
from outrider_testbed.relay import Relay
from outrider_testbed.testbed import TINY, Testbed
from outrider_testbed.traffic import Case, run_all, run_in_turn
from outrider_testbed.warm import WarmProcess, WarmPython
from outrider_testbed.workers import Draft, HostedProcess, Target

__all__ = [
    "TINY",
    "Case",
    "Cluster",
    "Draft",
    "HostedProcess",
    "Oracle",
    "Relay",
    "Target",
    "Testbed",
    "WarmProcess",
    "WarmPython",
    "run_all",
    "run_in_turn",
]
