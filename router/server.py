"""One router: frontend, group owner and administration behind one gRPC port, and the frontend over HTTP beside it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.cluster.config import ClusterConfig
from outrider.cluster.redis_access import RedisAccess
from outrider.cluster.registry import Registry
from outrider.core.errors import ConfigError, Unavailable
from outrider.core.sampling import Verifier
from outrider.core.tracing import Tracing
from outrider.metrics.declared import text
from outrider.router.access import AccessInterceptor, AccessLog
from outrider.router.admin import AdminServicer, describe
from outrider.router.certificates import Certificates
from outrider.router.frontend import Frontend
from outrider.router.grammar_door import GrammarDoor
from outrider.router.group import Group, GroupSettings
from outrider.router.group_route import GroupRoute
from outrider.router.group_service import GroupPort, GroupServicer
from outrider.router.keys import ApiKeys, KeyInterceptor
from outrider.router.live_settings import LiveSettings, SettingsFollower
from outrider.router.metrics import router_registry
from outrider.router.reachable import reachable_host
from outrider.router.sampling_params import Defaults
from outrider.router.settings import SchedulerSettings, scheduler_settings
from outrider.router.streams import CHANNEL_OPTIONS
from outrider.router.tokenizer import TextTokenizer
from outrider.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)

if TYPE_CHECKING:
    from outrider.http_port import HttpPort

log = logging.getLogger(__name__)

SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)

# A name in the health service that is SERVING as long as the router answers, whether or not it takes requests.
LIVENESS = "liveness"
LAST_WORDS_S = 3.0  # for clients to hear that requests end that were not finished in time
SHUTTING_DOWN = "the router is shutting down; send the request again"


class RouterServer:
    """Use it as an async context manager: it serves inside, and drains when it is left by ``stop``.

    Attributes:
        address: where it listens, once started.
        http_url: where the OpenAI-compatible API is, once started; empty where it is off.
        metrics_url: where Prometheus reads, once started; empty where that port is off.
        group_address: where other routers reach its group, once started.
        group: the group that it owns, or will own when nobody else does.
        route: to whoever owns it.
    """

    def __init__(
        self,
        config: ClusterConfig,
        redis: str | RedisAccess,
        *,
        router_id: str,
        settings: GroupSettings | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Raises ``ConfigError`` if the model's tokenizer, the certificate or the file of keys cannot be used."""
        self.address = ""
        self.http_url = ""
        self.group_address = ""
        self.metrics_url = ""
        self._config = config
        self._router_id = router_id
        self._tokenizer = TextTokenizer(config.target.model)
        self._grammars = GrammarDoor(config.target.model, self._tokenizer)
        self._registry = Registry(redis, config.cluster)
        self._settings = settings or GroupSettings(step_timeout_s=config.target.step_timeout_s + 10)
        initial = LiveSettings(config.speculation.num_speculative_tokens, Verifier[config.speculation.verifier.upper()])
        self.group = Group(
            self._registry,
            self._tokenizer,
            self._scheduler_settings(initial),
            self._settings,
            scheduler_id=router_id,
            tracing=tracing,
        )
        self.route = GroupRoute(
            self.group,
            self._registry,
            router_id=router_id,
            poll_s=self._settings.poll_s,
            takeover_s=self._settings.grace_s,  # as long as for a target that was lost
        )
        self._group_servicer = GroupServicer(self.group, self._tokenizer, self._grammars, lambda: describe(self.group))
        self._group_port = GroupPort(config.router.host, config.router.group_port, self._group_servicer)
        self._frontend = Frontend(
            self.route,
            self._tokenizer,
            self._grammars,
            Defaults(initial.verifier),
            default_timeout_s=config.router.default_timeout_s,
            tracing=tracing,
        )
        self._live = SettingsFollower(self._registry, initial, self._apply, poll_s=1.0)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        router = config.router
        self._certificates = Certificates.of(router)
        self._keys = ApiKeys(router.api_key_file) if router.api_key_file is not None else None
        self._metrics = router_registry(self._frontend, lambda: self.group)
        self._listener = self._metrics_listener()
        self._http = self._http_door() if config.router.http_port is not None else None
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> RouterServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(0.0)

    async def start(self) -> None:
        """Listen and begin to look for the target. Raises ``Unavailable`` (Redis) or ``ConfigError`` (port taken); what
        was opened by then is closed.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop(0.0)
            raise

    async def _start(self) -> None:
        await self._registry.check()
        interceptors = (AccessInterceptor(), *((KeyInterceptor(self._keys),) if self._keys is not None else ()))
        # Two servers on one port would share its connections.
        options = (*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0))
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self._frontend, self._server)
        if self._http is not None:
            self._http.listen()
            self.http_url = self._http.url
        if self._listener is not None:
            self._listener.listen()
            self.metrics_url = self._listener.url
        admin = AdminServicer(
            self.group,
            self._live,
            cluster=self._config.cluster,
            router_id=self._router_id,
            http_url=self.http_url,
            remote=lambda: self.route.remote,
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        await self._report_health(serving=False)
        host, port = self._config.router.host, self._config.router.port
        try:
            if self._certificates is not None:
                bound = self._server.add_secure_port(f"{host}:{port}", self._certificates.grpc_credentials())
            else:
                bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            bound = 0
            log.debug("%s", error)
        if bound == 0:
            raise ConfigError(f"router.port: {host}:{port} is taken; choose another port, or 0 for a free one")
        group_port = await self._group_port.start()
        self.group_address = f"{reachable_host(host, self._registry.url)}:{group_port}"
        await self._server.start()
        self.address = f"{host}:{bound}"
        self._tasks = [
            asyncio.create_task(self.group.run(), name="group"),
            asyncio.create_task(self.route.run(), name="route"),
            asyncio.create_task(self._live.run(), name="live settings"),
            asyncio.create_task(self._show(), name="registration"),
        ]
        if self._http is not None:
            self._tasks.append(asyncio.create_task(self._http.serve(), name="http"))
        if self._listener is not None:
            self._tasks.append(asyncio.create_task(self._listener.serve(), name="metrics"))
            log.info("router %s tells its metrics at %s", self._router_id, self.metrics_url)
        log.info("router %s listens on %s, HTTP: %s", self._router_id, self.address, self.http_url or "off")

    async def run(self) -> None:
        """Wait until a part of the router ends, and raise what it failed with."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled():
                task.result()

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests, let running ones finish for ``grace_s``, then end."""
        self._frontend.draining = self._group_servicer.draining = True
        self.group.target.resign()
        if self._http is not None:
            self._http.drain()
        await self._report_health(serving=False)
        deadline = time.monotonic() + grace_s
        while (self._frontend.num_open or self.group.num_unfinished) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # two counters of two objects; ends by itself
        self.group.fail_all(Unavailable(SHUTTING_DOWN))
        self.route.end(Unavailable(SHUTTING_DOWN))
        deadline = time.monotonic() + LAST_WORDS_S
        while self._frontend.num_open and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if self._http is not None:
            await self._http.stop()
        if self._listener is not None:
            await self._listener.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.route.aclose()
        await self._group_port.stop(1.0)
        if self._server is not None:
            await self._server.stop(1.0)
        if self._tasks:  # else another router may be known by that name
            with contextlib.suppress(Unavailable):
                await self._registry.withdraw("router", self._router_id)
        await self._registry.aclose()
        self._grammars.close()

    def _http_door(self) -> HttpPort:
        from outrider.router.http.app import Served, make_app
        from outrider.router.http.door import http_door

        router = self._config.router
        served = Served(
            frontend=self._frontend,
            tokenizer=self._tokenizer,
            names=router.served_model_name or (Path(self._config.target.model).name,),
            max_model_len=lambda: self.route.info.max_model_len if self.route.info is not None else None,
            state=self._state,
            is_alive=lambda: self.route.state == "ready",
            tool_call_parser=router.tool_call_parser,
            with_metrics=router.per_request_spec_decode_metrics != "none",
            metrics=lambda: text(self._metrics),
            keys=self._keys,
        )
        return http_door(router, AccessLog(make_app(served)), self._certificates)

    def _metrics_listener(self) -> HttpPort | None:
        from outrider.metrics.listener import metrics_listener

        async def tell() -> str:
            return text(self._metrics)

        router = self._config.router
        if router.metrics_port is None:
            return None
        return metrics_listener("router.metrics_port", router.host, router.metrics_port, tell=tell, state=self._state)

    def _state(self) -> str:
        """ "ready", or why requests would not be answered."""
        if self._frontend.draining:
            return "draining"
        return self.route.state

    def _apply(self, live: LiveSettings) -> None:
        self._frontend.defaults = Defaults(live.verifier)
        self.group.update_settings(self._scheduler_settings(live))

    def _scheduler_settings(self, live: LiveSettings) -> SchedulerSettings:
        return scheduler_settings(self._config, live.num_speculative_tokens)

    async def _show(self) -> None:
        """Keep health and registration as they should be: known to others once it serves, and as long as it lives."""
        announced: dict[str, object] = {}
        due = 0.0
        was_serving: bool | None = None
        while True:
            serving = self._state() == "ready"
            if serving != was_serving:
                await self._report_health(serving=serving)
                was_serving = serving
            now = time.monotonic()
            record = self._record()
            if (announced or serving) and (now >= due or record != announced):
                announced, due = record, now + self._registry.ttl_s / 4
                try:
                    await self._registry.announce("router", self._router_id, record)
                except Unavailable as error:
                    log.debug("%s", error)
            await asyncio.sleep(self._settings.poll_s / 5)

    def _record(self) -> dict[str, object]:
        return {
            "router_id": self._router_id,
            "address": self.address,
            "http_url": self.http_url,
            "pid": os.getpid(),
            "metrics_url": self.metrics_url,
            "group_address": self.group_address,
            "group_id": self.group.target.group_id,
            "group_token": self.group.token or 0,  # of the routers that name one, the largest owns the group
        }

    async def _report_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *SERVICES):
            await self._health.set(service, status)
        # Whoever restarts routers that are stuck asks for this one: a router that waits or drains is well.
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
