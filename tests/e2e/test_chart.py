"""The program started as Kubernetes would: with the arguments, variables and settings that the chart renders.

A kubelet of a few lines reads the pods of the CPU trial: it expands variables, mounts volumes as folders, and keeps the
words of each container's command. What KubeRay and the cluster's DNS add is done here: ``ray start``, and a loopback
address in place of a service's name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.client import Client
from outrider_chart import NAME, ROOT, Object, Rendered, container, render

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

START_TIMEOUT_S = 420.0  # a busy machine imports torch twice at once, and may have to build an operator
STOP_TIMEOUT_S = 60.0
TOKEN = "0123456789abcdef" * 4


class Kubelet:
    """Runs containers of rendered pods as processes of this machine."""

    def __init__(self, rendered: Rendered, folder: Path) -> None:
        self._rendered = rendered
        self._folder = folder
        # Ray's sockets need a short path.
        self.scratch = Path(tempfile.mkdtemp(prefix="outrider-chart-", dir="/tmp"))
        self._mark = secrets.token_hex(8)
        self._secrets = {item["metadata"]["name"]: item["stringData"] for item in rendered.all("Secret")}
        self._secrets[NAME] = {"auth_token": TOKEN}  # KubeRay's
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, pod: Object, box: Object, command: list[str] | None = None) -> None:
        """``command`` stands for the container's own, as where KubeRay writes it."""
        name = box["name"]
        where = {mount["mountPath"]: self._mount(pod, mount["name"]) for mount in box.get("volumeMounts", [])}
        environment = self._environment(box, where)
        words = command or [
            self._local(_expanded(word, environment), where) for word in (*box["command"], *box["args"])
        ]
        with (self._folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*_program(words[0]), *words[1:]],
                env={**environment, "PATH": _path()},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self, pod: Object, box: Object, timeout_s: float) -> str:
        """A container that ends: its log. It must succeed."""
        self.start(pod, box)
        assert self.processes[box["name"]].wait(timeout_s) == 0, self.logs()
        return (self._folder / f"{box['name']}.log").read_text()

    def stop(self, name: str, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM, and the status that the process ends with."""
        process = self.processes[name]
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        return process.wait(timeout_s)

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            for name, process in self.processes.items():
                if process.poll() not in (None, 0):
                    pytest.fail(f"{name} ended with status {process.returncode}, before {what}\n{self.logs()}")
            if time.monotonic() > deadline:
                pytest.fail(f"not within {timeout_s:g} s: {what}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        files = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)

    def close(self) -> None:
        """End what is still there, in the order in which a cluster goes."""
        for name in ("router", "supervisor", "ray-worker", "ray-head", "redis"):
            if name in self.processes and self.processes[name].poll() is None:
                try:
                    self.stop(name)
                except subprocess.TimeoutExpired:
                    self.processes[name].kill()
                    self.processes[name].wait()
        # What a killed `ray start` left.
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get("OUTRIDER_TEST_MARK") == self._mark:
                    process.kill()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _mount(self, pod: Object, name: str) -> Path:
        volume = next(item for item in pod["volumes"] if item["name"] == name)
        folder = self._folder / name
        if "emptyDir" in volume and not folder.exists():
            folder.mkdir()
        if "configMap" in volume:
            folder.mkdir(exist_ok=True)
            wanted = volume["configMap"]["name"].removeprefix(NAME)
            for file, text in self._rendered.one("ConfigMap", wanted)["data"].items():
                (folder / file).write_text(_here(text))
        return folder

    def _environment(self, box: Object, where: dict[str, Path]) -> dict[str, str]:
        environment = {
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "PYTHONSAFEPATH": "1",
            "OUTRIDER_TEST_MARK": self._mark,
        }
        for variable in box.get("env", []):
            if "value" in variable:
                value = self._local(_here(variable["value"]), where)
            else:
                reference = variable["valueFrom"]["secretKeyRef"]
                value = self._secrets[reference["name"]][reference["key"]]
            environment[variable["name"]] = value
        # KubeRay gives these to the containers that it fills in.
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN} if box["name"].startswith("ray-") else {}
        # What is compiled on this machine need not be compiled again.
        environment.pop("TORCH_EXTENSIONS_DIR", None)
        kept = {name: os.environ[name] for name in ("HOME", "TORCH_EXTENSIONS_DIR") if name in os.environ}
        return environment | kept

    @staticmethod
    def _local(word: str, where: dict[str, Path]) -> str:
        """The word with paths of mounted volumes as they are on this machine."""
        paths = "|".join(re.escape(path) for path in sorted(where, key=len, reverse=True)) or "$^"
        return re.sub(rf"(^|=)({paths})(?=/|$)", lambda match: f"{match[1]}{where[match[2]]}", word)


def _here(text: str) -> str:
    """Names of services and folders of the image, as they are on this machine."""
    text = re.sub(rf"{NAME}-\w+(?=:\d)", "127.0.0.1", text)
    return text.replace("/opt/outrider/models", str(ROOT / "models"))


def _expanded(word: str, environment: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], word)


def _program(name: str) -> list[str]:
    """The programs of the image, as they are here."""
    if name == "outrider":
        return [sys.executable, "-P", "-m", "outrider.cluster.cli"]
    if name == "redis-server":
        from outrider.cluster.redis_server import find_redis_server

        return [str(find_redis_server())]
    if name == "ray":
        return [sys.executable, "-P", "-m", "ray.scripts.scripts"]
    raise ValueError(f"the images have no program {name}")


def _path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def ray_start(group: Object, box: Object, *more: str) -> list[str]:
    """What KubeRay makes of a group: parameters of ``ray start``, resources, labels, CPUs of the limits."""
    resources = dict(group["resources"])
    cpus = resources.pop("CPU", box["resources"]["limits"]["cpu"])
    words = ["ray", "start", "--block", f"--num-cpus={cpus}", *more]
    for key, value in group["rayStartParams"].items():
        # Both pods are on one machine here, and other Rays may be too.
        words.append(f"--{key}={0 if key in ('node-manager-port', 'object-manager-port') else value}")
    words.append(f"--resources={json.dumps({key: float(value) for key, value in resources.items()})}")
    words.append("--labels=" + ",".join(f"{key}={value}" for key, value in group["labels"].items()))
    return words


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def health(address: str, service: str) -> str:
    """As Kubernetes' gRPC probe: SERVING, NOT_SERVING, or nothing where nobody answers."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=5.0
            )
        except grpc.RpcError:
            return ""
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[tuple[Rendered, Kubelet]]:
    """The CPU trial on ports that are free here. Nothing runs yet."""
    redis, gcs, router = free_ports(3)
    values: dict[str, Any] = {
        "redis": {"port": redis, "auth": {"password": secrets.token_hex(16)}},
        "rayCluster": {"head": {"gcsPort": gcs}},
        # Streams end in that time on any machine.
        "routerSpec": {"containerPort": router, "servicePort": router, "drainSeconds": 300},
    }
    rendered = render("cpu-trial", values)
    kubelet = Kubelet(rendered, tmp_path)
    try:
        yield rendered, kubelet
    finally:
        kubelet.close()


def test_the_program_runs_as_the_chart_says(trial: tuple[Rendered, Kubelet]) -> None:
    rendered, kubelet = trial
    redis_pod = rendered.one("StatefulSet")["spec"]["template"]["spec"]
    head_pod = rendered.head["template"]["spec"]
    worker = rendered.workers()["target"]
    worker_pod = worker["template"]["spec"]
    router = container(rendered.router, "router")
    address = f"127.0.0.1:{router['ports'][0]['containerPort']}"

    def probed(name: str) -> bool:
        probe = router[name]["grpc"]
        return health(f"127.0.0.1:{probe['port']}", probe["service"]) == "SERVING"

    # In no order that helps: the supervisor waits for nodes, the router for a target.
    kubelet.start(redis_pod, container(redis_pod, "redis"))
    kubelet.wait_for("Redis listens", lambda: listens(container(redis_pod, "redis")["ports"][0]["containerPort"]))
    head = container(head_pod, "ray-head")
    kubelet.start(head_pod, head, ray_start(rendered.head, head, "--head", f"--temp-dir={kubelet.scratch}"))
    gcs_port = head["livenessProbe"]["grpc"]["port"]
    kubelet.wait_for("Ray's head is alive", lambda: health(f"127.0.0.1:{gcs_port}", "") == "SERVING")
    kubelet.start(head_pod, container(head_pod, "supervisor"))
    kubelet.start(rendered.router, router)
    kubelet.wait_for("the router is alive", lambda: probed("livenessProbe"))
    kubelet.wait_for("the supervisor waits for nodes", lambda: "waiting for nodes of Ray" in kubelet.logs())
    assert not probed("readinessProbe")

    box = container(worker_pod, "ray-worker")
    kubelet.start(worker_pod, box, ray_start(worker, box, f"--address=127.0.0.1:{gcs_port}"))
    kubelet.wait_for("the router is ready", lambda: probed("readinessProbe"))
    kubelet.wait_for("target and draft serve", lambda: "the target and its drafts serve" in kubelet.logs())

    # `helm test`.
    pod = rendered.one("Pod")["spec"]
    answer = json.loads(kubelet.run(pod, container(pod, "generate"), timeout_s=120.0).splitlines()[-1])
    assert len(answer["token_ids"]) == 16
    with Client(address) as client:
        kubelet.wait_for(
            "the router has the draft", lambda: [draft["state"] for draft in client.status()["drafts"]] == ["ready"]
        )

        # A roll-out: what runs is finished, nothing new is taken, and another router takes over.
        with client.stream("The with statement", max_tokens=200, ignore_eos=True) as stream:
            pieces = iter(stream)
            next(pieces)
            kubelet.processes["router"].send_signal(signal.SIGTERM)
            kubelet.wait_for("the router is not ready any more", lambda: not probed("readinessProbe"))
            for _ in pieces:
                pass
        assert stream.completion.finish_reason == "length"
        assert len(stream.completion.token_ids) == 200
    assert kubelet.stop("router") == 0
    kubelet.start(rendered.router, router)
    kubelet.wait_for("another router is ready", lambda: probed("readinessProbe"))

    assert kubelet.stop("router") == 0
    assert kubelet.stop("supervisor") == 0
