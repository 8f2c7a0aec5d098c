"""Whether spans are made at all, and what is needed for them."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from outrider.core import tracing
from outrider.core.errors import ConfigError
from outrider.core.tracing import TraceSettings, settings_with

ENDPOINT = "http://collector:4317"
VARIABLE = {"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT}


@pytest.mark.parametrize(
    ("endpoint", "environment", "expected"),
    [
        (None, {}, None),
        (ENDPOINT, {}, TraceSettings(ENDPOINT, 0.5)),
        (None, VARIABLE, TraceSettings("", 0.5)),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": ENDPOINT}, TraceSettings("", 0.5)),
        (ENDPOINT, {"OTEL_SDK_DISABLED": "true"}, None),
        (None, {**VARIABLE, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, None),
        (ENDPOINT, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, TraceSettings(ENDPOINT, 0.5)),
    ],
)
def test_settings_and_variables(
    endpoint: str | None, environment: dict[str, str], expected: TraceSettings | None
) -> None:
    assert settings_with(endpoint, 0.5, environment) == expected


def test_what_is_not_installed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Settings that want spans are wrong then; variables may be meant for others."""
    monkeypatch.setattr(tracing, "_has_exporter", lambda: False)
    with pytest.raises(ConfigError, match=r"tracing.otlp_endpoint is set, but .* pip install 'outrider\[tracing\]'"):
        settings_with(ENDPOINT, 1.0, {})
    with caplog.at_level(logging.WARNING):
        assert settings_with(None, 1.0, VARIABLE) is None
    assert "no spans are sent" in caplog.text


def test_nothing_is_imported_where_nothing_is_traced() -> None:
    code = """
import sys
import outrider.router.server, outrider.workers.draft.worker, outrider.workers.target.spans
assert not [name for name in sys.modules if name.startswith(("opentelemetry.exporter", "opentelemetry.sdk.trace"))]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
