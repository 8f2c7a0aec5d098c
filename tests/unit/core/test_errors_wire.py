"""Errors on the wire."""

from __future__ import annotations

import base64
from urllib.parse import quote

import pytest

from outrider.core.errors import InvalidRequest, NotFound, OutriderError
from outrider.core.errors_wire import error_to_status


@pytest.mark.parametrize("character", ["x", "\u00fc", "\u6f22"])
@pytest.mark.parametrize("kind", [InvalidRequest, NotFound])
def test_a_status_fits_into_what_peers_take(kind: type[OutriderError], character: str) -> None:
    """Else the call ends with the transport's own RESOURCE_EXHAUSTED, which a client takes for a full queue."""
    long = 5000 * character
    error = InvalidRequest("chat", long, long) if kind is InvalidRequest else NotFound(long)
    status = error_to_status(error)
    assert status.message
    assert len(quote(status.message)) + len(base64.b64encode(status.SerializeToString())) < 8000
