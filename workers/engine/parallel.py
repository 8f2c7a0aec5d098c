"""What the ranks of one tensor-parallel group say to each other."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.core.errors import ConfigError, GroupError
from outrider.workers.engine import shm
from outrider.workers.engine.channel import Channel

logger = logging.getLogger(__name__)


class Parallel:
    """This process's place in its group. Use ``single`` or ``connect`` to make one.

    Attributes:
        rank: 0 to ``world_size`` - 1; rank 0 leads.
        world_size: number of ranks.
        local_size: number of ranks on this host.
        shared_memory: whether sums go through shared memory.
        order_fixed: whether a sum's order of additions does not depend on the size of the message.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        local_size: int,
        *,
        channel: Channel | None = None,
        shared_memory: bool = False,
        on_cuda: bool = False,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_size = local_size
        self.shared_memory = shared_memory
        self.order_fixed = world_size <= 2 or not on_cuda
        self._on_cuda = on_cuda
        self._channel = channel

    @classmethod
    def single(cls) -> Parallel:
        """A group of one."""
        return cls(0, 1, 1)

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
        """Find the other ranks; rank 0 listens on the master's address. Once in a process: torch.distributed is global.

        Args:
            local_size: ranks on this host.
            master_addr, master_port: of rank 0, the same on every rank; see ``free_port``.
            node_ip: this host's own address, which other ranks reach.
            device: "cpu" or "cuda".
            timeout_s: how long to wait for the others, and for one collective later on.

        Raises:
            GroupError: they did not come together in time.
            ConfigError: no network interface owns ``node_ip``.
        """
        if world_size == 1:
            return cls.single()
        interface = interface_of(node_ip)
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["NCCL_SOCKET_IFNAME"] = interface
        # DeepSpeed reads these; without LOCAL_SIZE its shared-memory operator ends in a segmentation fault.
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_SIZE=str(local_size),
            MASTER_ADDR=master_addr,
            MASTER_PORT=str(master_port),
        )
        os.environ.setdefault("LOCAL_RANK", "0")
        os.environ.setdefault("DS_ACCELERATOR", device)
        timeout = datetime.timedelta(seconds=timeout_s)
        on_cuda = device == "cuda"
        # Built before anyone waits for anyone: the first time takes longer than a rank should be waited for.
        able = shm.prepare(device, local_size, world_size)
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                master_addr, master_port, world_size, is_master=rank == 0, timeout=timeout
            )
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
                store=dist.PrefixStore("outrider", store),  # type: ignore[attr-defined]
                rank=rank,
                world_size=world_size,
                timeout=timeout,
            )
            channel = Channel(store, rank, world_size, master_addr, timeout_s)
        except (RuntimeError, ValueError, GroupError) as error:
            if dist.is_initialized():
                dist.destroy_process_group()
            reason = " ".join(str(error).split())[:300]
            raise GroupError(
                f"rank {rank} of {world_size} found no group at {master_addr}:{master_port} "
                f"in {timeout_s:g} s: {reason}"
            ) from error
        shared = _start_deepspeed(rank, able, master_addr, master_port, on_cuda)
        return cls(rank, world_size, local_size, channel=channel, shared_memory=shared, on_cuda=on_cuda)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the ranks, in place. tensor: any shape, contiguous, floating, the same shape on all ranks."""
        if self.world_size == 1 or tensor.numel() == 0:
            return
        if self.shared_memory and tensor.device.type == "cpu":
            shm.all_reduce(tensor, self.world_size)
        elif self.world_size == 2 or self._on_cuda:
            dist.all_reduce(tensor)
        else:
            # gloo's order depends on the size of the message; rank order does not.
            parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
            dist.all_gather(parts, tensor)
            tensor.copy_(parts[0])
            for part in parts[1:]:
                tensor.add_(part)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks in rank order, bit by bit, on every rank. Shape and dtype must agree.

        In shared memory each rank adds its part to negative zeros, since x + (-0.0) is x for every x (signalling NaNs
        alone become quiet ones); types other than float32 travel as 16-bit pieces, which float32 holds exactly.
        """
        if self.world_size == 1 or tensor.numel() == 0:
            return [tensor] * self.world_size
        if not (self.shared_memory and tensor.device.type == "cpu"):
            parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.world_size)]
            dist.all_gather(parts, tensor.contiguous())
            return parts
        if tensor.dtype == torch.float32:
            return self._gather_floats(tensor.contiguous())
        if tensor.element_size() == 1:
            return [part.to(tensor.dtype) for part in self._gather_floats(tensor.float())]
        pieces = tensor.contiguous().view(-1).view(torch.int16).float()
        return [part.to(torch.int16).view(tensor.dtype).view(tensor.shape) for part in self._gather_floats(pieces)]

    def _gather_floats(self, tensor: Tensor) -> list[Tensor]:
        parts = torch.full((self.world_size, *tensor.shape), -0.0, dtype=torch.float32)
        parts[self.rank] = tensor
        shm.all_reduce(parts, self.world_size)
        return list(parts)

    def broadcast_ints(self, values: Sequence[int] | None, timeout_s: float | None = None) -> list[int]:
        """Rank 0's integers (signed, 64 bits, any number) on every rank; the others give None and wait asleep.

        Raises ``GroupError`` when a rank is gone or ``timeout_s`` seconds passed.
        """
        if self._channel is not None:
            return self._channel.broadcast(values, timeout_s)
        if values is None:
            raise GroupError("rank 0 must give the integers to broadcast")
        return list(values)

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values, on every rank. Slow, but it gives up when a rank does not come.

        Raises ``GroupError`` then, after the group's timeout.
        """
        if self.world_size == 1:
            return value
        values = torch.tensor([value], dtype=torch.int64)
        try:
            dist.all_reduce(values, op=dist.ReduceOp.MIN)
        except RuntimeError as error:
            raise GroupError(f"rank {self.rank} waited in vain: {' '.join(str(error).split())[:200]}") from error
        return int(values.item())

    def barrier(self) -> None:
        """Return when every rank has come here. Raises ``GroupError`` when one does not, after the group's timeout."""
        self.smallest(0)

    def close(self) -> None:
        """Leave the group. Safe to call twice; a closed group is of no further use."""
        if self._channel is None:
            return
        self._channel.close()
        self._channel = None
        with contextlib.suppress(RuntimeError):  # the others may be gone already
            dist.destroy_process_group()


def _start_deepspeed(rank: int, able: bool, master_addr: str, master_port: int, on_cuda: bool) -> bool:
    """Hand the group to DeepSpeed. Returns whether sums may go through shared memory: all ranks decide alike."""
    import deepspeed.comm

    votes = torch.tensor([1.0 if able else 0.0])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    shared = bool(votes.item())
    if not shared:
        os.environ["LOCAL_SIZE"] = "0"  # keeps DeepSpeed from mapping segments
    # A dead group at the same address may have left segments whose states would mislead a rank that is early.
    segment = shm.segment_path(rank, master_addr, master_port)
    segment.unlink(missing_ok=True)
    dist.all_reduce(votes)
    with shm.quiet():
        deepspeed.comm.init_distributed("nccl" if on_cuda else "gloo", auto_mpi_discovery=False, verbose=False)
    dist.all_reduce(votes)
    # Every rank has mapped every segment: without a name the memory goes when the processes do.
    segment.unlink(missing_ok=True)
    logger.info("rank %d: sums go through %s", rank, "shared memory" if shared else "torch.distributed")
    return shared


def interface_of(ip: str) -> str:
    """Name of the network interface that owns an address. Raises ``ConfigError`` if none does."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.split("%")[0] == ip for address in addresses):
            return name
    raise ConfigError(f"no network interface of {socket.gethostname()} has the address {ip}")


def free_port(host: str) -> int:
    """A TCP port that is free on an address at this moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
