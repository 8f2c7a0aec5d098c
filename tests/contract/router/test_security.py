"""TLS and keys of a router's doors, with certificates that the tests sign."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.client import AsyncClient, ConfigError, Unauthenticated, Unavailable
from outrider.router import certificates
from outrider.router import keys as keys_module
from outrider.router.server import RouterServer
from outrider_certificates import Files, served_at

PROMPT = "Once upon"
DEADLINE_S = 60.0


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "tls")


def client_of(server: RouterServer, **security: Any) -> AsyncClient:
    return AsyncClient(server.address, timeout=DEADLINE_S, **security)


def ports(server: RouterServer) -> tuple[int, int]:
    """Those of gRPC and HTTP."""
    return int(server.address.rpartition(":")[2]), httpx.URL(server.http_url).port or 0


def of(module: ModuleType, caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What a module wrote into the log."""
    return [record for record in caplog.records if record.name == module.__name__]


async def status_over_http(server: RouterServer, files: Files, key: str | None = None) -> int:
    """Of a request over a connection of its own."""
    headers = {"authorization": f"Bearer {key}"} if key is not None else {}
    verify = ssl.create_default_context(cafile=files.ca_certs)
    async with httpx.AsyncClient(timeout=DEADLINE_S, verify=verify, headers=headers) as http:
        return (await http.get(f"{server.http_url}/models")).status_code


async def test_tls_and_what_clients_are_told_about_it(world: Any, files: Files, tmp_path: Path) -> None:
    await world.target()
    server = await world.router(router=files.router)
    async with client_of(server, ca_certs=files.ca_certs) as client:
        assert (await client.generate(PROMPT, max_tokens=4)).usage.completion_tokens == 4
    other = Files(tmp_path / "other")
    for security, line in (
        ({}, "speaks TLS: give ca_certs"),
        ({"ca_certs": other.ca_certs}, r"other/ca\.crt does not vouch for .unable to get local issuer certificate"),
    ):
        async with client_of(server, **security) as client:
            with pytest.raises(ConfigError, match=line):
                await client.status()
            with pytest.raises(ConfigError, match=line):
                await client.generate(PROMPT)
    files.renew("router.example.org")
    async with client_of(server, ca_certs=files.ca_certs) as client:
        with pytest.raises(ConfigError, match="a certificate for other names"):
            await client.status()
    plain = await world.router(router_id="plain", wait=False)
    async with client_of(plain, ca_certs=files.ca_certs) as client:
        with pytest.raises(ConfigError, match="speaks no TLS: leave out ca_certs"):
            await client.status()
    await server.stop(0.0)
    async with client_of(server, ca_certs=files.ca_certs) as client:
        with pytest.raises(Unavailable, match="no answer from"):
            await client.status()
    async with client_of(server) as client:
        with pytest.raises(Unavailable, match="no answer from"):
            await client.status()


async def test_clients_show_a_certificate_of_the_ca(world: Any, files: Files, tmp_path: Path) -> None:
    await world.target()
    clients = Files(tmp_path / "clients", None, "client@example.org")
    strangers = Files(tmp_path / "strangers", None, "client@example.org")
    server = await world.router(router={**files.router, "ssl_ca_certs": str(clients.ca_certs)})

    async def let_in(shows: Files) -> bool:
        """Whether both doors answer who shows such a certificate; they must agree."""
        trusting = ssl.create_default_context(cafile=files.ca_certs)
        trusting.load_cert_chain(shows.certificate, shows.key)
        try:
            async with httpx.AsyncClient(timeout=DEADLINE_S, verify=trusting) as http:
                over_http = (await http.get(f"{server.http_url}/models")).status_code == 200
        except httpx.TransportError:
            over_http = False
        async with client_of(server, ca_certs=files.ca_certs, **shows.shown) as client:
            if not over_http:
                with pytest.raises(ConfigError, match=r"ended the TLS handshake: .* give another certificate"):
                    await client.status()
            else:
                assert (await client.status())["router_id"] == "router-0"
        return over_http

    assert await let_in(clients)
    assert not await let_in(strangers)
    async with client_of(server, ca_certs=files.ca_certs) as client:
        with pytest.raises(ConfigError, match="give a certificate by client_cert"):
            await client.status()
    with pytest.raises(httpx.TransportError):
        await status_over_http(server, files)
    # Who was trusted is not any more, and the other way round.
    Files.write(clients.ca_certs, strangers.ca.cert_pem.bytes())
    assert not await let_in(clients)
    assert await let_in(strangers)


async def test_no_session_is_resumed_without_the_certificate(world: Any, files: Files, tmp_path: Path) -> None:
    """TLS 1.2 resumes by an id, whatever became of the CA."""
    await world.target()
    clients = Files(tmp_path / "clients", None, "client@example.org")
    old, new = (ssl.create_default_context(cafile=files.ca_certs) for _ in range(2))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    for context in (old, new):
        context.load_cert_chain(clients.certificate, clients.key)
    guarded = await world.router(router={**files.router, "ssl_ca_certs": str(clients.ca_certs)})
    open_to_all = await world.router(router_id="other", wait=False, router=files.router)
    async with httpx.AsyncClient(timeout=DEADLINE_S, verify=old) as http:
        assert (await http.get(f"{open_to_all.http_url}/models")).status_code == 200
        with pytest.raises(httpx.TransportError):
            await http.get(f"{guarded.http_url}/models")
    async with httpx.AsyncClient(timeout=DEADLINE_S, verify=new) as http:
        assert (await http.get(f"{guarded.http_url}/models")).status_code == 200


async def test_a_renewed_certificate_is_for_the_next_connection(
    world: Any, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    target = await world.target()
    first = files.renew()
    server = await world.router(router=files.router)

    async def served() -> set[bytes]:
        return {await served_at(port, files.ca_certs) for port in ports(server)}

    target.pause()
    verify = ssl.create_default_context(cafile=files.ca_certs)
    async with (
        client_of(server, ca_certs=files.ca_certs) as client,
        client.stream(PROMPT, max_tokens=30) as stream,
        httpx.AsyncClient(timeout=DEADLINE_S, verify=verify) as http,
        http.stream(
            "POST", f"{server.http_url}/completions", json={"prompt": PROMPT, "max_tokens": 30, "stream": True}
        ) as answer,
    ):
        await world.until(lambda: server.group.num_unfinished == 2, "both requests run", timeout_s=DEADLINE_S)
        assert await served() == {first}
        second = files.renew()
        assert await served() == {second}

        caplog.set_level(logging.INFO, certificates.__name__)
        leaf = files.issue()
        for broken in (leaf.private_key_pem.bytes(), b"", b"-----BEGIN"):
            caplog.clear()
            Files.write(files.key, broken)  # of another pair; of none
            for _ in range(3):
                assert await served() == {second}
            (record,) = of(certificates, caplog)
            assert (record.levelname, "ssl_certfile" in record.message) == ("ERROR", True)
        caplog.clear()
        files.key.unlink()
        assert await served() == {second}
        (record,) = of(certificates, caplog)
        assert "cannot read" in record.message
        third = files.renew()
        assert await served() == {third}

        target.resume()  # who was here before all that goes on
        assert len("".join([piece async for piece in stream])) == 30
        assert (await answer.aread()).endswith(b"data: [DONE]\n\n")


async def test_files_that_cannot_be_used_are_named_at_the_start(world: Any, files: Files, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    nothing.write_text("")
    for changes, line in (
        ({"ssl_keyfile": str(tmp_path / "none")}, "router.ssl_keyfile: cannot read"),
        ({"ssl_keyfile": str(nothing)}, "router.ssl_certfile: .* cannot be used"),
        ({"ssl_ca_certs": str(nothing)}, "router.ssl_ca_certs: .* cannot be used"),
        ({"api_key_file": str(nothing)}, "router.api_key_file: .*holds no key"),
    ):
        with pytest.raises(ConfigError, match=line):
            await world.router(router={**files.router, **changes})


def put(file: Path, text: str) -> None:
    """In place."""
    file.write_text(text)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    put(file, "# ours\nfirst\n\nsecond\n")
    return file


async def test_calls_need_a_key_and_leave_nothing_behind_without(world: Any, keys: Path) -> None:
    await world.target()
    server = await world.router(router={"api_key_file": str(keys)})
    for key in ("first", "second"):
        async with client_of(server, api_key=key) as client:
            assert (await client.generate(PROMPT, max_tokens=2)).usage.completion_tokens == 2
    before = (await client_with_status(server, "first"))["groups"][0]["steps"]
    for key, line in ((None, "wants an API key: give api_key"), ("third", "does not know the API key that was given")):
        async with client_of(server, api_key=key) as client:
            for call in (
                lambda: client.generate(PROMPT, request_id="mine"),
                client.status,
                client.get_settings,
                lambda: client.update_settings(num_speculative_tokens=0),
                lambda: client.abort("mine"),
            ):
                with pytest.raises(Unauthenticated, match=line):
                    await call()
    assert server.group.num_unfinished == 0
    after = await client_with_status(server, "first")
    assert (after["groups"][0]["steps"], after["running"], after["queued"]) == (before, 0, 0)
    assert after["settings"]["num_speculative_tokens"] == 4
    assert await world.registry.get_settings() == {}
    async with client_of(server, api_key="second") as client:
        assert (await client.generate(PROMPT, request_id="mine", max_tokens=1)).request_id == "mine"


async def client_with_status(server: RouterServer, key: str) -> dict[str, Any]:
    async with client_of(server, api_key=key) as client:
        return await client.status()


async def test_health_is_for_all_and_reflection_for_those_with_a_key(world: Any, keys: Path) -> None:
    await world.target()
    server = await world.router(router={"api_key_file": str(keys)})
    async with grpc.aio.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def serves() -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        await world.until(serves, "the health service says so", timeout_s=DEADLINE_S)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def services(*metadata: tuple[str, str]) -> set[str]:
            call = reflection.ServerReflectionInfo(timeout=DEADLINE_S, metadata=metadata)
            with contextlib.suppress(asyncio.InvalidStateError):  # it was refused before it was asked
                await call.write(ask)
            return {each.name for each in (await call.read()).list_services_response.service}

        named = await services(("authorization", "Bearer first"))
        assert "outrider.v1.GenerationService" in named
        for metadata in (
            (),
            (("authorization", "Bearer third"),),
            (("authorization", "first"),),
            (("authorization", "Basic first"),),
            (("authorization", "Bearer"),),
            (("authorization", "Bearer first second"),),
            (("authorization", "Bearer third"), ("authorization", "Bearer first")),
            (("authorization-bin", b"Bearer first"),),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await services(*metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, metadata
            assert "authorization: Bearer KEY" in (caught.value.details() or "")
        silent = reflection.ServerReflectionInfo(timeout=DEADLINE_S)
        assert await silent.code() is grpc.StatusCode.UNAUTHENTICATED
        unknown = channel.unary_unary("/outrider.v1.Nothing/Nothing")
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await unknown(b"", timeout=DEADLINE_S)


async def test_keys_change_with_their_file_from_the_next_request_on(
    world: Any, files: Files, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = await world.target()
    server = await world.router(router={**files.router, "api_key_file": str(keys)})

    async def admitted(client: AsyncClient, key: str) -> bool:
        over_http = await status_over_http(server, files, key)
        assert over_http in (200, 401)
        try:
            await client.status()
        except Unauthenticated:
            assert over_http == 401
            return False
        assert over_http == 200
        return True

    security = {"ca_certs": files.ca_certs}
    async with (
        client_of(server, api_key="first", **security) as first,
        client_of(server, api_key="thirds", **security) as other,
    ):
        assert await admitted(first, "first")
        assert not await admitted(other, "thirds")
        target.pause()
        async with first.stream(PROMPT, max_tokens=20) as stream:
            await world.until(lambda: server.group.num_unfinished == 1, "the request runs", timeout_s=DEADLINE_S)
            for _ in range(5):  # as fast as it goes, and each time of the same size
                put(keys, "thirds\n")
                assert not await admitted(first, "first")
                assert await admitted(other, "thirds")
                put(keys, "first \n")
                assert await admitted(first, "first")
                assert not await admitted(other, "thirds")
            put(keys, "thirds\n")
            target.resume()  # what was admitted goes on
            assert len("".join([piece async for piece in stream])) == 20
        assert await admitted(other, "thirds")
        caplog.set_level(logging.WARNING, keys_module.__name__)
        for spoil in (lambda: put(keys, "# nobody\n"), keys.unlink):
            caplog.clear()
            spoil()
            assert await admitted(other, "thirds")
            assert not await admitted(first, "first")
            (record,) = of(keys_module, caplog)
            assert "those that were read before hold" in record.message


def test_what_a_client_cannot_use_is_named(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.client import Client, Endpoint

    for security, line in (
        ({"ca_certs": tmp_path / "none"}, "ca_certs: cannot read"),
        ({"ca_certs": files.key}, "ca_certs: .* holds no certificate"),
        ({"client_cert": files.certificate}, "client_cert and client_key need each other"),
        (files.shown, "client_cert is of use with TLS only"),
        (
            {"ca_certs": files.ca_certs, **files.shown, "client_key": files.ca_certs},
            "client_cert and client_key cannot",
        ),
        ({"api_key": "a\nb"}, "api_key holds characters"),
    ):
        with pytest.raises(ConfigError, match=line):
            Client("127.0.0.1:1", **security)
    for variable, value in (
        ("OUTRIDER_ADDRESS", "router:7070"),
        ("OUTRIDER_CA_CERTS", str(files.ca_certs)),
        ("OUTRIDER_API_KEY", "secret"),
        ("OUTRIDER_CLIENT_CERT", ""),
    ):
        monkeypatch.setenv(variable, value)
    named = Endpoint.named()
    assert (named.address, named.ca_certs, named.api_key) == ("router:7070", str(files.ca_certs), "secret")
    assert named.client_cert is None
    assert "secret" not in repr(named)
    assert Endpoint.named(api_key="mine").api_key == "mine"
