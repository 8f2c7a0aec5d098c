"""What the ranks of one tensor-parallel group say to each other."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Parallel:
    """This process's place in its group.

    Attributes:
        rank: 0 to ``world_size`` - 1; rank 0 leads.
        world_size: number of ranks.
        local_size: number of ranks on this host.
    """

    rank: int
    world_size: int
    local_size: int

    @classmethod
    def single(cls) -> Parallel:
        """A group of one."""
        raise NotImplementedError

    @classmethod
    def connect(
        cls,
        *,
        rank: int,
        world_size: int,
        local_size: int,
        master_addr: str,
        master_port: int,
        node_ip: str,
        device: str = "cpu",
        timeout_s: float = 120.0,
    ) -> Parallel:
        """Find the other ranks; rank 0 listens on the master's address. Once in a process.

        Raises ``GroupError`` when they do not come together within ``timeout_s`` seconds.
        """
        raise NotImplementedError

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place. tensor: any shape, contiguous, the same on all ranks."""
        raise NotImplementedError

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks in rank order, bit by bit, on every rank. Shape and dtype must agree."""
        raise NotImplementedError

    def broadcast_ints(self, values: Sequence[int] | None, timeout_s: float | None = None) -> list[int]:
        """Rank 0's integers (64 bits, any number) on every rank; other ranks pass None and wait without spinning.

        Raises ``GroupError`` when a rank is gone or ``timeout_s`` seconds passed.
        """
        raise NotImplementedError

    def barrier(self) -> None:
        """Return when every rank has come here."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the group. Safe to call twice."""
        raise NotImplementedError


def interface_of(ip: str) -> str:
    """Name of the network interface that owns an address. Raises ``ConfigError`` if none does."""
    raise NotImplementedError


def free_port(host: str) -> int:
    """A TCP port that is free on an address at this moment."""
    raise NotImplementedError
