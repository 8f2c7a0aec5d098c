"""A supervisor's router, as a process of its own before a real target."""

from __future__ import annotations

from pathlib import Path

from outrider.cluster.config import load_config
from outrider.cluster.registry import Registry
from outrider.cluster.router_process import RouterProcess
from outrider_certificates import Files
from outrider_testbed import Testbed


async def test_it_is_found_ready_behind_keys_and_tls(testbed: Testbed, tmp_path: Path) -> None:
    """Whoever starts it may have no key, no CA, and no certificate to show."""
    files, clients = Files(tmp_path / "tls", None, "router.example.org"), Files(tmp_path / "clients")
    (tmp_path / "keys").write_text("a-key\n")
    guards = {**files.router, "ssl_ca_certs": str(clients.ca_certs), "api_key_file": str(tmp_path / "keys")}
    target = testbed.target("one")
    cluster = testbed.cluster(target, router=guards)
    router = RouterProcess(load_config(cluster._file), tmp_path, cluster._redis_url)
    cluster.announce("target", target.record["group_id"], target.next_record())
    router.launch()
    try:
        async with Registry(cluster._redis_url, cluster.name) as registry:
            await router.wait_registered(registry)
            await router.wait_ready(registry, 0)
    finally:
        await router.stop()
        cluster.withdraw(target.record["group_id"])
