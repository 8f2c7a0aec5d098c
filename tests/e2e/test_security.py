"""A whole cluster with client certificates, keys, and a Redis behind TLS and a password."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider_certificates import Files
from outrider_redis import PASSWORD, Guarded, find_redis_with_tls, guarded

KEY = "k3y-of-ours"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Guarded]:
    """Behind TLS where there is a program for that, and behind a password."""
    program = find_redis_with_tls()
    with guarded(tmp_path / "redis", with_tls=program if isinstance(program, Path) else None) as server:
        yield server


@pytest.mark.slow
def test_a_cluster_with_all_of_it(make_cluster: Any, redis: Guarded, tmp_path: Path) -> None:
    """The supervisor has neither key nor client certificate, and finds out all the same when its router is ready."""
    files = Files(tmp_path / "tls")
    keys, password = tmp_path / "keys", tmp_path / "password"
    keys.write_text(KEY)
    password.write_text(PASSWORD)
    settings = {"url": redis.url, "password_file": str(password)}
    if redis.files is not None:
        settings["ca_certs"] = str(redis.files.ca_certs)
    cluster = make_cluster(
        target={"tensor_parallel_size": 1},
        redis=settings,
        router={**files.router, "ssl_ca_certs": str(files.ca_certs), "api_key_file": str(keys)},
    )
    cluster.up()
    given = ["--ca-certs", str(files.ca_certs), "--client-cert", str(files.certificate)]
    given += ["--client-key", str(files.key)]
    cluster.environment["OUTRIDER_API_KEY"] = KEY
    status = json.loads(cluster.ok("status", "--json", *given))
    assert [draft["state"] for draft in status["drafts"]] == ["ready"]
    answer = cluster.generate("def add(", "--max-tokens", "8", "--ignore-eos", *given)
    assert answer["usage"]["completion_tokens"] == 8
    for args, line in (([], "speaks TLS"), (given[:2], "ended the TLS handshake")):
        refused = cluster.outrider("status", *args)
        assert line in refused.stderr
        assert refused.stderr.count("\n") == 1, refused.stderr
    assert "does not know the API key" in cluster.refusal("status", *given, "--api-key", "other")

    # The router comes back where it was, and the supervisor hears of it.
    router = status["supervisor"]["processes"]["router"]
    os.kill(router, signal.SIGKILL)
    cluster.wait_for(lambda: cluster.state()["children"][-1]["pid"] != router, "another router")
    cluster.wait_for(lambda: cluster.outrider("status", *given).returncode == 0, "an answer of the router")

    for process in cluster.processes():
        words = " ".join(process.cmdline())
        assert PASSWORD not in words
        assert KEY not in words
    folders = [cluster.state_folder, *map(Path, cluster.state()["scratch"])]
    seen = [file for folder in folders for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    assert any(file.name == "supervisor.log" for file in seen)
    for file in seen:
        content = file.read_bytes()
        assert PASSWORD.encode() not in content, file
        assert KEY.encode() not in content, file
