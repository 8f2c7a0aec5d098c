"""Settings of the HTTP door."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.cluster.config import RouterConfig, parse_config
from outrider.core.errors import ConfigError


def router_of(lines: str, base: Path = Path("/etc/outrider")) -> RouterConfig:
    return parse_config(f"target: {{model: /models/m}}\nrouter: {{{lines}}}", base=base).router


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
