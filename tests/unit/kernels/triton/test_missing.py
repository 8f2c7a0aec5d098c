"""Without Triton the package imports, and says what is missing."""

from __future__ import annotations

import sys

import pytest

from outrider.kernels.triton import missing


def test_without_triton_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert missing() == "Triton is not installed"
    monkeypatch.delitem(sys.modules, "outrider.kernels.triton.linear", raising=False)
    with pytest.raises(ImportError, match="triton"):
        __import__("outrider.kernels.triton.linear")
