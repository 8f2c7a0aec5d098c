"""Peers: what they are asked, how their answers are read, and what is left out; against a server of three lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from outrider.bench.items import Item
from outrider.bench.load import Job
from outrider.bench.peers import Launch, Peers, PeerSettings, launches
from outrider.bench.peers.protocols import COMPLETIONS, LLAMA_CPP, Asking, Reading
from outrider.bench.records import Record
from outrider.client import ConfigError, Unavailable

SERVER = """
    import json, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(500 if asked["prompt"] == "bad" else 200); self.end_headers()
            for count in range(1, asked["max_tokens"] + 1):
                event = {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 3, "completion_tokens": count}}
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
            self.wfile.write(b"data: [DONE]\\n\\n")
        def log_message(self, *args):
            pass

    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def settings(*words: str, model: Path | None = None, gguf: Path | None = None) -> PeerSettings:
    return PeerSettings.parse(words, model, gguf, dtype="float32", threads=1, slots=2, asking=Asking())


def job(prompt: str, max_tokens: int = 4) -> Job:
    return Job(Item("i", prompt, max_tokens=max_tokens), Record("w", "i", 0, "peer", 0, 0.0, 0.0, 0.0), seed=5)


async def test_a_peer_is_an_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    launch = Launch("vllm", (sys.executable, "-P", str(script), "{port}"), COMPLETIONS, {})
    monkeypatch.setattr("outrider.bench.peers.launches", lambda *_: [launch])
    async with Peers(settings(), lambda line: None) as arms:
        (arm,) = arms
        process = child_that_runs(script)
        await until_status(process, psutil.STATUS_STOPPED)
        with arm.turn():
            seen = await arm.send(job("abc"))
            assert (arm.name, seen.error, seen.tokens, seen.prompt_tokens) == ("vllm", None, 4, 3)
            failed = await arm.send(job("bad"))
            assert failed.error is not None
            assert "HTTP 500" in failed.error
        await until_status(process, psutil.STATUS_STOPPED)
    assert not process.is_running()


def child_that_runs(script: Path) -> psutil.Process:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # one of another test that just ends
            if str(script) in child.cmdline():
                return child
    raise AssertionError("it does not run")


async def until_status(process: psutil.Process, status: str) -> None:
    async with asyncio.timeout(30):
        while process.status() != status:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)


async def test_a_peer_that_ends_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch("vllm", (sys.executable, "-c", "raise SystemExit('no such model')"), COMPLETIONS, {})
    monkeypatch.setattr("outrider.bench.peers.launches", lambda *_: [launch])
    with pytest.raises(Unavailable, match="vllm ended before it was ready: no such model"):
        async with Peers(settings(), lambda line: None):
            pass


def test_what_is_not_installed_is_left_out_with_one_line(tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.touch()
    words = ("llama.cpp=/nowhere/llama-server", "vllm=/nowhere/python", "transformers=/nowhere/python")
    lines: list[str] = []
    assert launches(settings(*words, model=tmp_path, gguf=gguf), lines.append) == []
    assert [line.split(":")[1].strip() for line in lines] == ["llama.cpp", "vllm", "transformers"]


def test_a_launch_names_model_threads_and_slots(tmp_path: Path) -> None:
    gguf, binary = tmp_path / "m.gguf", tmp_path / "llama-server"
    gguf.touch()
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    (launch,) = launches(settings(f"llama.cpp={binary}", gguf=gguf), lambda line: None)
    words = " ".join(launch.command)
    for part in (str(binary), str(gguf), "-t 1", "-np 2", "--port {port}"):
        assert part in words


def test_a_draft_changes_name_and_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.peers.has_module", lambda *_: True)
    names = ("vllm", "transformers")
    plain = settings(*names, model=tmp_path)
    with_draft = replace(plain, draft_model=tmp_path / "draft", num_draft_tokens=3)
    assert [launch.name for launch in launches(plain, print)] == list(names)
    made = launches(with_draft, print)
    assert [launch.name for launch in made] == ["vllm+draft", "transformers+draft"]
    assert all(str(tmp_path / "draft") in " ".join(launch.command) for launch in made)
    assert json.dumps({"model": str(tmp_path / "draft"), "num_speculative_tokens": 3}) in made[0].command


@pytest.mark.parametrize(
    ("words", "message"),
    [(("ollama",), "no peer 'ollama'"), (("vllm",), "--peer-model"), (("llama.cpp",), "--peer-gguf")],
)
def test_a_peer_without_its_model_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(*words)


@pytest.mark.parametrize("protocol", [LLAMA_CPP, COMPLETIONS])
def test_a_request_has_prompt_seed_and_length(protocol: Any) -> None:
    item = Item("i", messages=({"role": "user", "content": "hi"},), max_tokens=9, options={"temperature": 0.7})
    body = protocol.body(item, Asking(seed=3, ignore_eos=True))
    assert body["prompt"] == "user: hi\n\nassistant:"
    assert (body["seed"], body["temperature"], body["ignore_eos"], body["stream"]) == (3, 0.7, True, True)
    assert 9 in (body.get("n_predict"), body.get("max_tokens"))
    assert protocol.body(Item("i", "p"), Asking(temperature=0.2))["temperature"] == 0.2


def test_events_of_llama_cpp_are_read() -> None:
    reading = Reading(LLAMA_CPP)
    events: list[dict[str, Any]] = [
        {"content": "a", "tokens": [1]},
        {"content": "bc", "tokens": [2, 3]},
        {"content": "d"},
        {"content": "", "stop": True, "stop_type": "limit", "tokens_predicted": 5, "tokens_evaluated": 8},
    ]
    for at, event in enumerate(events):
        reading.take(b"data: " + json.dumps(event).encode() + b"\n", float(at))
        reading.take(b"\n", float(at))
    assert [(arrival.at, arrival.tokens) for arrival in reading.arrivals] == [(0, 1), (1, 2), (2, 1), (3, 1)]
    assert (reading.prompt_tokens, reading.finish_reason) == (8, "length")
    with pytest.raises(ValueError, match="the server failed: out of memory"):
        reading.take(b'data: {"error": "out of memory"}\n', 5.0)
