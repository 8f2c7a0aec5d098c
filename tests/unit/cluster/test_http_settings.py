"""Settings of the HTTP door."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from outrider.cluster import checks
from outrider.cluster.checks import check_router_port
from outrider.cluster.config import ClusterConfig, RouterConfig, parse_config
from outrider.cluster.router_process import RouterProcess
from outrider.core.errors import ConfigError


def config_of(lines: str) -> ClusterConfig:
    return parse_config(f"target: {{model: /models/m}}\nrouter: {{{lines}}}", base=Path("/etc/outrider"))


def router_of(lines: str) -> RouterConfig:
    return config_of(lines).router


def test_on_by_default_and_off_by_null() -> None:
    assert router_of("").http_port == 0
    assert router_of("http_port: null").http_port is None


def test_one_name_or_several() -> None:
    assert router_of("served_model_name: m").served_model_name == ("m",)
    assert router_of("served_model_name: [m, n]").served_model_name == ("m", "n")


def test_files_lie_beside_the_settings() -> None:
    router = router_of("api_key_file: keys/all, ssl_certfile: /tls/tls.crt, ssl_keyfile: tls.key")
    assert router.api_key_file == "/etc/outrider/keys/all"
    assert (router.ssl_certfile, router.ssl_keyfile) == ("/tls/tls.crt", "/etc/outrider/tls.key")


@pytest.mark.parametrize(
    "lines",
    [
        "http_port: 70000",
        "ssl_certfile: a",
        "ssl_keyfile: a",
        "ssl_ca_certs: a",
        "tool_call_parser: other",
        "per_request_spec_decode_metrics: detailed",
    ],
)
def test_what_cannot_be_is_refused(lines: str) -> None:
    with pytest.raises(ConfigError, match="router"):
        router_of(lines)


def test_a_port_that_cannot_be_had_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"router.http_port: cannot listen on 127.0.0.1:{port}"):
            check_router_port(config_of(f"http_port: {port}"))
    check_router_port(config_of("http_port: null"))
    # Whoever else may have this one now.
    monkeypatch.setattr(checks, "_check_port", lambda *address: None)
    with pytest.raises(ConfigError, match=r"router\.http_port is 7070, which is router\.port too"):
        check_router_port(config_of("http_port: 7070, port: 7070"))
    with pytest.raises(ConfigError, match=r"router\.group_port is 7070, which is router\.port too"):
        check_router_port(config_of("group_port: 7070, port: 7070"))


def test_a_router_that_is_started_again_keeps_its_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouterProcess, "_free_again", lambda self, port: port)
    router = RouterProcess(config_of(""), tmp_path, "redis://nowhere")
    router.address, router.http_url = "127.0.0.1:7070", "http://127.0.0.1:8000/v1"
    kept = router._settings().router
    assert (kept.port, kept.http_port) == (7070, 8000)
    off = RouterProcess(config_of("http_port: null"), tmp_path, "redis://nowhere")
    off.address = router.address
    assert off._settings().router.http_port is None


def test_a_port_that_somebody_took_meanwhile_is_given_up(tmp_path: Path) -> None:
    router = RouterProcess(config_of(""), tmp_path, "redis://nowhere")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        router.address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert router._settings().router.port == 0
