"""Three hosts: network namespaces joined by a bridge, each with a Ray node, a host name and a folder of its own.

Rank 0 and rank 1 are on two of them and the draft is on the third, tied there by custom resources. The texts must be
those of one host, and a draft whose host is cut off costs no text.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Cluster, MakeCluster
else:
    Cluster = MakeCluster = Any

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(1200)]

SUBNET = "10.77.83"
RAY_PORT = 6379
RAY_TIMEOUT_S = 180.0
PROMPT = "def add("
REQUESTS = (
    ("--temperature", "0", "--max-tokens", "32"),
    ("--temperature", "0.8", "--seed", "11", "--max-tokens", "32"),
    ("--temperature", "1", "--top-k", "50", "--top-p", "0.9", "--seed", "12", "--max-tokens", "32"),
)


def run(*command: str, check: bool = True, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return done


class Hosts:
    """The namespaces and what runs in them; numbers from 1 on. ``close`` ends and removes all of it."""

    def __init__(self, count: int) -> None:
        self._mark = secrets.token_hex(2)
        self.numbers = range(1, count + 1)
        self.bridge = f"orb{self._mark}"
        self.folder = Path(tempfile.mkdtemp(prefix="outrider-hosts-", dir="/tmp"))
        self._token = secrets.token_hex(32)
        self._holders: dict[int, subprocess.Popen[bytes]] = {}
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.ray_folder = self.folder / "ray"
        self.ray_folder.mkdir()
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "addr", "add", f"{SUBNET}.254/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        for number in self.numbers:
            name = self.name(number)
            run("ip", "netns", "add", name)
            run("ip", "link", "add", self.cable(number), "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", self.cable(number), "master", self.bridge, "up")
            run("ip", "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "route", "add", "default", "via", f"{SUBNET}.254")
            self._holders[number] = self._hold(name)

    def _hold(self, name: str) -> subprocess.Popen[bytes]:
        """A process that keeps the host's name (which resolves to nothing) and its own folder for Ray's files."""
        script = 'hostname "$0" && mount -t tmpfs tmpfs "$1" && echo ready && exec sleep infinity'
        holder = subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "-m", "-u", "bash", "-c", script, name, str(self.ray_folder)],
            stdout=subprocess.PIPE,
        )
        if holder.stdout is None or holder.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{name} could not get a name and a folder of its own")
        return holder

    def name(self, number: int) -> str:
        return f"or{self._mark}h{number}"

    def cable(self, number: int) -> str:
        return f"orv{self._mark}{number}"

    def address(self, number: int) -> str:
        return f"{SUBNET}.{number}"

    def command(self, number: int, *command: str) -> list[str]:
        """The command as it runs on that host."""
        return ["nsenter", "-t", str(self._holders[number].pid), "-n", "-m", "-u", "--", *command]

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "RAY_AUTH_TOKEN": self._token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONSAFEPATH": "1",
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        }

    def ray_environment(self) -> dict[str, str]:
        """Of Ray's own commands; outrider finds out by itself that there is a token."""
        return {**self.environment(), "RAY_AUTH_MODE": "token"}

    def start_ray(self, number: int, resources: str) -> None:
        """Start a Ray node; it belongs to the namespace and ends with ``close``."""
        role = ["--head", f"--port={RAY_PORT}", f"--temp-dir={self.ray_folder}", "--include-dashboard=false"]
        if number > 1:
            role = [f"--address={self.address(1)}:{RAY_PORT}"]
        ray = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *role]
        options = ["--num-cpus=1", "--object-store-memory=80000000", f"--resources={resources}", "--block"]
        command = self.command(number, *ray, f"--node-ip-address={self.address(number)}", *options)
        with (self.folder / f"node{number}.log").open("wb") as log:
            self._nodes.append(
                subprocess.Popen(command, env=self.ray_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def wait_for_nodes(self, count: int) -> None:
        probe = (
            "import ray, sys, time\n"
            "ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')\n"
            "while sum(node['Alive'] for node in ray.nodes()) < int(sys.argv[2]): time.sleep(0.2)\n"
        )
        command = self.command(1, sys.executable, "-P", "-c", probe, f"{self.address(1)}:{RAY_PORT}", str(count))
        deadline = time.monotonic() + RAY_TIMEOUT_S
        said = ""
        while time.monotonic() < deadline:
            try:
                done = subprocess.run(
                    command,
                    env=self.ray_environment(),
                    capture_output=True,
                    text=True,
                    timeout=deadline - time.monotonic(),
                    check=False,
                )
            except subprocess.TimeoutExpired:
                break
            if done.returncode == 0:
                return
            said = done.stderr[-500:]
            time.sleep(0.5)
        logs = "\n".join(path.read_text() for path in sorted(self.folder.glob("node*.log")))
        pytest.fail(f"not {count} Ray nodes within {RAY_TIMEOUT_S:g} s: {said}\n{logs}")

    def cut(self, number: int) -> None:
        """Pull the cable of a host."""
        run("ip", "link", "set", self.cable(number), "down")

    def close(self) -> None:
        for number in self.numbers:
            for pid in run("ip", "netns", "pids", self.name(number), check=False).stdout.split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for process in [*self._nodes, *self._holders.values()]:
            process.wait(30)
        for number in self.numbers:
            run("ip", "netns", "del", self.name(number), check=False)
        run("ip", "link", "del", self.bridge, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            pytest.skip(f"the program {program} is missing (Debian packages iproute2 and util-linux)")
    try:
        made = Hosts(3)
    except RuntimeError as error:
        pytest.skip(f"this machine allows no network namespaces or bridges: {error}")
    try:
        made.start_ray(1, '{"rank": 1}')
        made.wait_for_nodes(1)
        made.start_ray(2, '{"rank": 1}')
        made.start_ray(3, '{"draft": 1}')
        made.wait_for_nodes(3)
        yield made
    finally:
        made.close()


@pytest.fixture
def spread_cluster(hosts: Hosts, make_cluster: MakeCluster, tiny_pair: tuple[Path, Path]) -> Iterator[Cluster]:
    cluster = make_cluster(
        "hosts",
        ray={"address": f"{hosts.address(1)}:{RAY_PORT}"},
        target={"placement_strategy": "STRICT_SPREAD", "resources": {"rank": 1}},
        drafts=[
            {
                "name": "draft",
                "model": str(tiny_pair[1]),
                "placement": "remote",
                "resources": {"draft": 1},
                "num_threads": 1,
            }
        ],
    )
    cluster.environment.update(hosts.environment())
    cluster.prefix = hosts.command(1)
    cluster.up()
    yield cluster
    cluster.down()


def test_three_hosts_give_the_text_of_one(running_cluster: Cluster, spread_cluster: Cluster, hosts: Hosts) -> None:
    status = spread_cluster.wait_until_whole()
    (group,), (draft,) = status["groups"], status["drafts"]
    rank_hosts = {rank["node"] for rank in group["ranks"]}
    assert rank_hosts == {hosts.name(1), hosts.name(2)}
    assert draft["node"] == hosts.name(3)
    assert draft["address"].startswith(hosts.address(3) + ":")
    for process in [*group["ranks"], draft]:
        number = next(number for number in hosts.numbers if hosts.name(number) == process["node"])
        assert str(process["pid"]) in run("ip", "netns", "pids", hosts.name(number)).stdout.split()

    proposed = 0
    for options in REQUESTS:
        here = running_cluster.generate(PROMPT, *options)
        there = spread_cluster.generate(PROMPT, *options)
        assert there["token_ids"] == here["token_ids"], options
        assert there["text"] == here["text"]
        proposed += there["speculation"]["num_draft_tokens"]
    assert proposed > 0, "no proposal came from the draft's host: nothing was shown"

    hosts.cut(3)
    before = running_cluster.generate(PROMPT, *REQUESTS[1])
    after = spread_cluster.generate(PROMPT, *REQUESTS[1])
    assert after["token_ids"] == before["token_ids"]
    assert psutil.pid_exists(group["ranks"][0]["pid"])
    assert spread_cluster.status()["groups"][0]["epoch"] == group["epoch"], "the target does not depend on drafts"
