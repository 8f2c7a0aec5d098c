"""Runs rendered pods on this machine much as a kubelet would: each in a network of its own, with the ports, paths,
variables, commands and probes of the chart.

A container's volumes are mounted where it says, the rest of the file system is read-only to it, and it has no
capability. What it does not have is an image (the programs of this Python environment stand for it) and a user of its
own (the environment may lie where only root may look).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider_chart import ROOT, Object, Rendered

MODELS = "/opt/outrider/models"  # in the CPU image
EXTENSIONS = "/tmp/torch-extensions"
START_TIMEOUT_S = 600.0  # a busy machine imports torch several times at once, and may have to build an operator
STOP_TIMEOUT_S = 120.0
TOOL_TIMEOUT_S = 60.0

# Arguments: a folder, then SOURCE|TARGET|ro or rw for each mount, "--", and the command. What a container's image holds
# beyond this machine's files are the folders that volumes are mounted on, in a layer over each top folder.
ENTER = r"""
set -e
layers=$1; shift
mount --make-rprivate /
hostname "$(cat "$layers/hostname")"
for top in etc opt var; do
    mkdir -p "$layers/$top/upper" "$layers/$top/work" "/$top"
    mount -t overlay overlay -o "lowerdir=/$top,upperdir=$layers/$top/upper,workdir=$layers/$top/work" "/$top"
done
cp "$layers/hosts" /etc/hosts
echo "nameserver 127.0.0.1" > /etc/resolv.conf  # nobody there, which is known at once
while [ "$1" != -- ]; do
    IFS='|' read -r source target mode <<< "$1"
    mkdir -p "$target"
    mount --rbind "$source" "$target"
    [ "$mode" = rw ] || mount -o remount,bind,ro "$target"
    shift
done
shift
for top in etc opt var; do mount -o remount,ro "/$top"; done
mount -o remount,bind,ro /
cd /tmp
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all -- "$@"
"""

# Waits until whoever started it closes its input, or is killed, and then ends and removes all that has its mark.
CLEAN = r"""
cat > /dev/null
spaces=$(ip netns list | cut -d' ' -f1 | grep "^$1-")
for space in $spaces; do ip netns pids "$space" | xargs -r kill -KILL; done
for space in $spaces; do
    while [ -n "$(ip netns pids "$space")" ]; do sleep 0.1; done
    ip netns del "$space"
done
ip link del "$1" 2> /dev/null
rm -rf "/dev/shm/$1"
"""


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done


class Pod:
    """One pod and its containers' processes. Made by ``Kubelet.pod``."""

    def __init__(self, kubelet: Kubelet, name: str, spec: Object, address: str) -> None:
        self.name = name
        self.address = address
        self.spec = spec
        self._kubelet = kubelet
        self._folder = kubelet.folder / name
        self._folder.mkdir()
        self._shm = kubelet.shm / name
        self._volumes: dict[str, Path] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def container(self, name: str) -> Object:
        found: Object = next(item for item in self.spec["containers"] if item["name"] == name)
        return found

    def start(self, name: str, command: list[str] | None = None, environment: Mapping[str, str] | None = None) -> None:
        """``command`` stands for the container's own, as where KubeRay writes it; ``environment`` comes on top."""
        box = self.container(name)
        variables = self._environment(box) | dict(environment or {})
        words = command or [_expanded(word, variables) for word in (*box["command"], *box.get("args", []))]
        layers = self._folder / f"{name}-layers"
        layers.mkdir(exist_ok=True)
        (layers / "hosts").write_text(self._kubelet.hosts(self))
        (layers / "hostname").write_text(self.name)
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self._kubelet.namespace(self), "unshare", "--mount", "--uts", "--"),
                    *("bash", "-c", ENTER, "enter", str(layers), *self._mounts(box), "--", *words),
                ],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self, name: str, timeout_s: float = START_TIMEOUT_S) -> str:
        """A container that ends: its log. It must succeed."""
        self.start(name)
        assert self.processes[name].wait(timeout_s) == 0, self._kubelet.logs()
        return self.log(name).read_text()

    def log(self, name: str) -> Path:
        return self._kubelet.folder / f"{self.name}.{name}.log"

    def probed(self, name: str, probe: str) -> bool:
        """Whether a probe of a container succeeds now. Raises ``KeyError`` if it has none of that kind."""
        box = self.container(name)
        how = box[probe]
        timeout_s = float(how.get("timeoutSeconds", 1))
        if "exec" in how:
            return self.execute(name, *how["exec"]["command"], timeout_s=timeout_s) == 0
        [(kind, where)] = [(kind, how[kind]) for kind in ("httpGet", "grpc", "tcpSocket") if kind in how]
        port = where["port"]
        if not str(port).isdigit():
            port = next(each["containerPort"] for each in box["ports"] if each["name"] == port)
        if kind == "grpc":
            return _answers_grpc(f"{self.address}:{port}", where.get("service", ""), timeout_s)
        if kind == "tcpSocket":
            return _listens(self.address, int(port), timeout_s)
        url = f"{where.get('scheme', 'HTTP').lower()}://{self.address}:{port}{where['path']}"
        return 200 <= status_of(url, timeout_s) < 400

    def execute(self, name: str, *command: str, timeout_s: float) -> int:
        """A command inside a container that runs: its status, or -1 if it took longer."""
        box = self.container(name)
        pid = str(self.processes[name].pid)
        with self.log(f"{name}-exec").open("ab") as log:
            try:
                return subprocess.run(
                    ["nsenter", "-t", pid, "-n", "-m", "-u", "--", *command],
                    env=self._environment(box),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=timeout_s,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return -1

    def terminate(self, name: str) -> None:
        """Told to stop, as a kubelet does it: what it says for ``preStop``, then SIGTERM."""
        hook = self.container(name).get("lifecycle", {}).get("preStop")
        if hook is not None:
            assert self.execute(name, *hook["exec"]["command"], timeout_s=STOP_TIMEOUT_S) == 0
        with contextlib.suppress(ProcessLookupError):
            self.processes[name].send_signal(signal.SIGTERM)

    def stop(self, name: str, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """The status that it ends with once it was told to stop."""
        self.terminate(name)
        return self.processes[name].wait(timeout_s)

    def _environment(self, box: Object) -> dict[str, str]:
        environment = {
            "PATH": self._kubelet.path,
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            # Of the image.
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        for variable in box.get("env", []):
            if "value" in variable:
                environment[variable["name"]] = variable["value"]
            else:
                reference = variable["valueFrom"]["secretKeyRef"]
                environment[variable["name"]] = self._kubelet.secrets[reference["name"]][reference["key"]]
        return environment

    def _mounts(self, box: Object) -> list[str]:
        """Of the volumes and of what the image holds; /tmp last, since the sources may lie there."""
        mounts = []
        tmp: Path | None = None
        for mount in box.get("volumeMounts", []):
            source, target = self._volume(mount["name"]), mount["mountPath"]
            if target == "/tmp":
                tmp = source
            else:
                mounts.append(f"{source}|{target}|{'ro' if mount.get('readOnly') else 'rw'}")
        mounts.append(f"{ROOT / 'models'}|{MODELS}|ro")
        if tmp is None:
            return mounts
        # What is compiled on this machine need not be compiled again.
        mounts.append(f"{self._kubelet.extensions}|{tmp / Path(EXTENSIONS).relative_to('/tmp')}|rw")
        for kept in {str(ROOT), sys.prefix, sys.base_prefix}:
            if kept.startswith("/tmp/"):
                mounts.append(f"{kept}|{tmp / Path(kept).relative_to('/tmp')}|ro")
        return [*mounts, f"{tmp}|/tmp|rw"]

    def _volume(self, name: str) -> Path:
        """Its folder, the same for all containers of the pod."""
        if name in self._volumes:
            return self._volumes[name]
        volume = next((item for item in self.spec.get("volumes", []) if item["name"] == name), {"emptyDir": {}})
        folder = self._folder / name
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            folder = self._shm / name
        folder.mkdir(parents=True)
        files: dict[str, str] = {}
        if "configMap" in volume:
            files = self._kubelet.config_maps[volume["configMap"]["name"]]
        elif "secret" in volume:
            files = self._kubelet.secrets[volume["secret"]["secretName"]]
            if "items" in volume["secret"]:
                files = {item["path"]: files[item["key"]] for item in volume["secret"]["items"]}
        elif "emptyDir" not in volume:
            raise ValueError(f"no volumes of the kind of {volume}")
        for file, text in files.items():
            (folder / file).write_text(text)
        self._volumes[name] = folder
        return folder


class Kubelet:
    """Pods on a bridge of their own, and what they refer to. A context manager; they end with this process at last."""

    def __init__(self, rendered: Rendered, folder: Path, more_secrets: Mapping[str, Mapping[str, str]]) -> None:
        """Skips the test where there can be no networks. ``more_secrets``: those that the chart does not make."""
        from outrider.cluster.redis_server import find_redis_server

        self.folder = folder
        self.config_maps: dict[str, dict[str, str]] = {
            m["metadata"]["name"]: m["data"] for m in rendered.all("ConfigMap")
        }
        self.secrets: dict[str, Mapping[str, str]] = {
            **{item["metadata"]["name"]: item["stringData"] for item in rendered.all("Secret")},
            **more_secrets,
        }
        tools = (Path(sys.executable).parent, find_redis_server().parent)
        self.path = os.pathsep.join((*map(str, tools), os.environ.get("PATH", os.defpath)))
        extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
        self.extensions = Path(extensions)
        self.extensions.mkdir(parents=True, exist_ok=True)
        self._mark = f"orp{secrets.token_hex(3)}"
        self.subnet = f"10.{64 + secrets.randbelow(150)}.{secrets.randbelow(256)}"
        self._bridge = self._mark
        self.shm = Path("/dev/shm") / self._mark
        self._services: dict[str, Pod] = {}
        self.pods: list[Pod] = []
        if os.geteuid() != 0:
            pytest.skip("networks of pods need root")
        for program in ("ip", "unshare", "nsenter", "setpriv"):
            if shutil.which(program) is None:
                pytest.skip(f"the program {program} is missing (Debian packages iproute2 and util-linux)")
        self._cleaner = subprocess.Popen(
            ["bash", "-c", CLEAN, "clean", self._mark], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "addr", "add", f"{self.subnet}.254/24", "dev", self._bridge)
            _run("ip", "link", "set", self._bridge, "up")
        except RuntimeError as error:
            self.close()
            pytest.skip(f"this machine allows no networks of pods: {error}")

    def __enter__(self) -> Kubelet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def pod(self, name: str, spec: Object, *services: str) -> Pod:
        """A pod that others find by the names of services too. Nothing of it runs yet; add all pods before that."""
        pod = Pod(self, name, spec, f"{self.subnet}.{len(self.pods) + 1}")
        self.pods.append(pod)
        namespace, cable = self.namespace(pod), f"{self._mark}c{len(self.pods)}"
        _run("ip", "netns", "add", namespace)
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _run("ip", "link", "set", cable, "master", self._bridge, "up")
        _run("ip", "-n", namespace, "addr", "add", f"{pod.address}/24", "dev", "eth0")
        _run("ip", "-n", namespace, "link", "set", "eth0", "up")
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", namespace, "route", "add", "default", "via", f"{self.subnet}.254")
        for service in services:
            self._services[service] = pod
        return pod

    def namespace(self, pod: Pod) -> str:
        return f"{self._mark}-{pod.name}"

    def hosts(self, pod: Pod) -> str:
        """What names mean in a pod."""
        lines = ["127.0.0.1 localhost", f"{pod.address} {pod.name}"]
        return "\n".join([*lines, *(f"{to.address} {name}" for name, to in self._services.items())]) + "\n"

    def wait_for(self, what: str, condition: Callable[[], object], timeout_s: float = START_TIMEOUT_S) -> None:
        """Until it is true; at once if a container failed meanwhile."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            for pod in self.pods:
                for name, process in pod.processes.items():
                    if process.poll() not in (None, 0):
                        pytest.fail(f"{pod.name} {name} ended with {process.returncode}, before {what}\n{self.logs()}")
            if time.monotonic() > deadline:
                pytest.fail(f"not within {timeout_s:g} s: {what}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-4000:]}" for file in files)

    def close(self) -> None:
        """End and remove all of it."""
        self._cleaner.communicate(timeout=STOP_TIMEOUT_S)
        for pod in self.pods:
            for process in pod.processes.values():
                process.wait(STOP_TIMEOUT_S)


def ray_start(group: Object, box: Object, *more: str) -> list[str]:
    """What KubeRay makes of a group: parameters of ``ray start``, resources, labels, CPUs of the limits."""
    resources = dict(group["resources"])
    cpus = resources.pop("CPU", box["resources"]["limits"]["cpu"])
    words = ["ray", "start", "--block", f"--num-cpus={cpus}", "--metrics-export-port=8080", *more]
    words += [f"--{key}={value}" for key, value in group["rayStartParams"].items()]
    words.append(f"--resources={json.dumps({key: float(value) for key, value in resources.items()})}")
    words.append("--labels=" + ",".join(f"{key}={value}" for key, value in group["labels"].items()))
    return words


def status_of(
    url: str, timeout_s: float, *, headers: Mapping[str, str] | None = None, context: ssl.SSLContext | None = None
) -> int:
    """The status of a GET; 0 where nobody answers in time."""
    request = urllib.request.Request(url, headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=timeout_s, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return int(error.code)
    except (OSError, http.client.HTTPException):
        return 0


def _listens(host: str, port: int, timeout_s: float) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout_s):
        return True
    return False


def _answers_grpc(address: str, service: str, timeout_s: float) -> bool:
    """As Kubernetes' gRPC probe, which speaks no TLS."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _expanded(word: str, environment: Mapping[str, str]) -> str:
    """``$(NAME)``, as Kubernetes writes variables in commands."""
    return re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], word)
