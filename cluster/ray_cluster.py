"""The Ray cluster that hosts the actors: a local one of our own, or one that is joined by its address."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from outrider.cluster.config import RayConfig
from outrider.cluster.placement import NodeFacts, Resources, shortage
from outrider.cluster.telemetry import set_up_actor
from outrider.cluster.worker_logs import forward_as_json, log_as_others_do
from outrider.core.errors import ConfigError, GroupError, OutriderError, Unavailable

OBJECT_STORE_BYTES = 80 << 20  # tensors never go through Ray; this is about the least that it takes
EXIT_TIMEOUT_S = 5.0  # for processes that were told to go


class Hosted:
    """An actor that makes an object by its name and passes calls on, so that the supervisor never imports torch."""

    def __init__(self, module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tracing = set_up_actor()
        if tracing is not None:
            kwargs = {**kwargs, "tracing": tracing}
        self._object = getattr(importlib.import_module(module), name)(*args, **kwargs)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._object, method)(*args)


class TargetRank(Hosted):
    """So that ``ps`` and Ray's tools show what it is."""


class Draft(Hosted):
    """So that ``ps`` and Ray's tools show what it is."""


class RayCluster:
    """A connection to Ray from ``start`` to ``stop``; one for each process."""

    def __init__(self, config: RayConfig, cluster: str, *, json_logs: bool = False) -> None:
        """``json_logs``: what actors print goes on as JSON objects, one a line."""
        self._config = config
        self._json_logs = json_logs
        self._namespace = f"outrider-{cluster}"
        self.address = ""
        self.scratch: Path | None = None  # to remove after ``stop``
        self._roots: list[psutil.Process] = []  # what a local Ray started at first; the rest descends from it

    @property
    def is_local(self) -> bool:
        return self._config.address is None

    def prepare(self) -> None:
        """Make the folder of a local Ray's files. Its path is short: Unix sockets allow 107 bytes."""
        if self.is_local:
            self.scratch = Path(tempfile.mkdtemp(prefix="outrider-ray-", dir="/tmp"))

    def start(self, num_actors: int) -> None:
        """Start a local Ray with room for ``num_actors``, or join the one that the settings name.

        Raises ``Unavailable`` if it does not answer.
        """
        if self._config.address is not None:
            require_listener(self._config.address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if self.is_local:
            # Ray replaces a loopback address by the one of the network unless it believes to be on a desktop system.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
            # Ray runs its workers at niceness 15, which anything else on the machine would starve.
            os.environ.setdefault("RAY_worker_niceness", "0")
        elif has_ray_token():
            # As `ray start` does. `ray.init` would leave the token of a cluster that it joins unused.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        import ray
        import ray.exceptions

        if self._json_logs:
            log_as_others_do()
        options: dict[str, Any] = {"namespace": self._namespace, "log_to_driver": True, "logging_level": "WARNING"}
        if self.is_local:
            options |= {
                "address": "local",
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                # CPUs are what Ray counts actors by; threads are shared out by ``threads_per_actor``.
                "num_cpus": self._config.num_cpus or max(usable_cores(), num_actors),
                "_temp_dir": str(self.scratch),
                "_node_ip_address": "127.0.0.1",  # nothing of a cluster on one machine is to be reached from outside
            }
        else:
            options["address"] = self._config.address
        before = set(psutil.Process().children())
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
            ray.shutdown()  # what is half connected would refuse the next try
            if self.is_local:
                raise Unavailable(f"a local Ray does not start: {first_line(error)}") from error
            raise Unavailable(
                f"Ray at {self._config.address} cannot be joined: {first_line(error)}; see ray.address, "
                "and where its token authentication is on, RAY_AUTH_TOKEN"
            ) from error
        if self._json_logs:
            forward_as_json()
        self.address = ray.get_runtime_context().gcs_address
        if self.is_local:
            self._roots = [child for child in psutil.Process().children() if child not in before]

    def nodes(self) -> list[NodeFacts]:
        """The living nodes, in order of their ids."""
        import ray
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return [
            NodeFacts(
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                cores=usable_cores() if self.is_local else int(node["Resources"].get("CPU", 1)),
                total=node["Resources"],
                available=free.get(node["NodeID"], {}),
            )
            for node in sorted(ray.nodes(), key=lambda node: str(node["NodeID"]))
            if node["Alive"]
        ]

    async def place(self, bundles: Sequence[Resources], strategy: str, timeout_s: float) -> Any:
        """A placement group that holds the bundles. Raises ``ConfigError`` if there is no room for it."""
        from ray.util.placement_group import placement_group, remove_placement_group

        lacking = shortage(bundles, self.nodes())
        if lacking is not None:
            raise ConfigError(f"Ray cannot place the target: {lacking}; see ray.num_cpus and target.resources")
        group = placement_group(list(bundles), strategy=strategy)
        try:
            await asyncio.wait_for(asyncio.wrap_future(group.ready().future()), timeout_s)
        except TimeoutError:
            remove_placement_group(group)
            raise ConfigError(
                f"Ray found no room for {len(bundles)} ranks with strategy {strategy} within {timeout_s:g} s; "
                "see target.placement_strategy, or `ray status` for who holds the resources"
            ) from None
        return group

    def stop(self) -> None:
        """Leave, and end a local Ray with all of its processes."""
        import ray

        processes = [process for root in self._roots for process in family(root)]
        with contextlib.suppress(SystemExit):
            ray.shutdown()
        # Ray tells its workers to go and does not look whether they do; on a busy machine that takes them seconds.
        _, alive = psutil.wait_procs(processes, timeout=EXIT_TIMEOUT_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=EXIT_TIMEOUT_S)


class Actor:
    """One remote object: calls with deadlines, errors in our own words."""

    def __init__(self, title: str, kind: type[Hosted], where: str, kwargs: dict[str, Any], **options: Any) -> None:
        """``where`` is ``module:Class``; ``options`` are those of Ray, with ``resources`` as a bundle spells them."""
        import ray

        self.title = title
        needs: Resources = options.pop("needs")
        module, _, name = where.partition(":")
        custom = {key: amount for key, amount in needs.items() if key not in ("CPU", "GPU")}
        self._handle = (
            ray.remote(kind)
            .options(
                num_cpus=needs.get("CPU", 0.0),
                num_gpus=needs.get("GPU", 0.0),
                resources=custom,
                max_restarts=0,
                **options,
            )
            .remote(module, name, (), kwargs)
        )

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Raises the ``OutriderError`` that the object raised; ``GroupError`` if it died, broke or was silent."""
        import ray.exceptions

        try:
            reply = self._handle.call.remote(method, *args)
            return await asyncio.wait_for(asyncio.wrap_future(reply.future()), timeout_s)
        except TimeoutError:
            raise GroupError(f"{self.title} did not answer {method!r} within {timeout_s:g} s") from None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, OutriderError):
                raise type(cause)(*cause.args) from None
            raise GroupError(
                f"{self.title} failed in {method!r}: {type(cause).__name__}: {first_line(cause)}"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise GroupError(f"{self.title} died") from error
        except ray.exceptions.RayError as error:
            raise GroupError(f"{self.title} is lost: {first_line(error)}") from error

    def kill(self) -> None:
        """End its process now. Does nothing if it is dead."""
        import ray

        ray.kill(self._handle, no_restart=True)


def family(root: psutil.Process) -> list[psutil.Process]:
    """A process and all that descend from it, as far as they are still there."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def require_listener(address: str, timeout_s: float = 5.0) -> None:
    """Raises ``Unavailable`` if nobody listens there: Ray itself would go on trying for minutes.

    Addresses that name no port, such as ``auto``, are left to Ray.
    """
    where = host_and_port(address)
    if where is None:
        return
    try:
        socket.create_connection(where, timeout_s).close()
    except OSError as error:
        reason = error.strerror or error
        raise Unavailable(
            f"Ray at {address} does not answer ({reason}); start it with `ray start` or correct ray.address"
        ) from error


def host_and_port(address: str) -> tuple[str, int] | None:
    """Of an address of Ray, or None if it names no port."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    return (host.strip("[]"), int(port)) if port.isdigit() else None


def has_ray_token() -> bool:
    """Whether this user has a token for Ray clusters, in the environment or in a file."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return (Path(path) if path else Path.home() / ".ray" / "auth_token").is_file()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, short enough for one of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def thread_environment(num_threads: int) -> dict[str, str]:
    """Variables of an actor's process that bound its threads before any library starts some."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        # At the end of each part of a pass libgomp's threads spin while they wait for one another, for some ten
        # milliseconds unless told. Where a target and its draft share processors, those that spin keep those that they
        # wait for from running, and a pass takes many times as long: so 50 microseconds. What was set outside counts.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000"),
        "TOKENIZERS_PARALLELISM": "false",
        # A folder named like one of our rooms in the working directory must not be importable by its bare name.
        "PYTHONSAFEPATH": "1",
    }
