"""The chart as a user has it: rendered by a real helm, as plain objects."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "outrider"
PROFILES = ("cpu-trial", "one-gpu", "one-node-8-gpus", "many-nodes")
NAME = "demo-outrider"  # of a release "demo"

TIMEOUT_S = 600.0  # of a helm that hangs, on the slowest machine

Object = dict[str, Any]


@functools.cache
def helm() -> str:
    """The helm to use; skips the test, with the reason, where there is none and none can be fetched."""
    done = subprocess.run(
        [ROOT / "scripts" / "helm.sh"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        pytest.skip(f"no helm: {done.stderr.strip()}")
    return done.stdout.strip()


def run_helm(*words: str, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """Nothing is checked. Neither a cluster nor the user's own files are looked at."""
    with tempfile.TemporaryDirectory() as home:
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": home, "KUBECONFIG": "/dev/null"}
        command = [helm(), *words]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT
        )


@dataclass(frozen=True)
class Rendered:
    """What ``helm template`` answers."""

    objects: tuple[Object, ...]

    def all(self, kind: str) -> list[Object]:
        return [item for item in self.objects if item["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> Object:
        """The one object of a kind, or that of them whose name, without the release's, is ``name``."""
        found = [item for item in self.all(kind) if name is None or item["metadata"]["name"] == f"{NAME}{name}"]
        assert len(found) == 1, f"{kind} {name}: {[item['metadata']['name'] for item in self.all(kind)]}"
        return found[0]

    @property
    def settings(self) -> str:
        """The program's settings file."""
        text: str = self.one("ConfigMap", "")["data"]["outrider.yaml"]
        return text

    @property
    def router(self) -> Object:
        pod: Object = self.one("Deployment")["spec"]["template"]["spec"]
        return pod

    @property
    def head(self) -> Object:
        group: Object = self.one("RayCluster")["spec"]["headGroupSpec"]
        return group

    def workers(self) -> dict[str, Object]:
        return {group["groupName"]: group for group in self.one("RayCluster")["spec"]["workerGroupSpecs"]}

    def pods(self) -> Iterator[tuple[str, Object]]:
        """Title and specification of every pod that comes of it."""
        for item in self.objects:
            title = f"{item['kind']} {item['metadata']['name']}"
            if item["kind"] == "Pod":
                yield title, item["spec"]
            elif item["kind"] == "RayCluster":
                yield f"{title} head", item["spec"]["headGroupSpec"]["template"]["spec"]
                for group in item["spec"]["workerGroupSpecs"]:
                    yield f"{title} {group['groupName']}", group["template"]["spec"]
            elif "template" in item.get("spec", {}):
                yield title, item["spec"]["template"]["spec"]

    def containers(self) -> Iterator[tuple[str, Object]]:
        for title, pod in self.pods():
            for container in (*pod.get("initContainers", []), *pod["containers"]):
                yield f"{title} {container['name']}", container


def render(profile: str | None = None, values: dict[str, Any] | None = None) -> Rendered:
    """The chart under a profile and values of one's own. Each pair is rendered once."""
    return _render(profile, json.dumps(values or {}, sort_keys=True))


@functools.cache
def _render(profile: str | None, values: str) -> Rendered:
    done = template(profile, json.loads(values))
    assert done.returncode == 0, done.stderr
    return Rendered(tuple(item for item in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if item))


def template(profile: str | None, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """``helm template``, whatever comes of it."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file)
        file.flush()
        files = [CHART / "profiles" / f"{profile}.yaml"] if profile else []
        words = [word for path in (*files, Path(file.name)) for word in ("-f", str(path))]
        return run_helm("template", "demo", str(CHART), "--namespace", "llm", *words)


def container(pod: Object, name: str) -> Object:
    """A container of a pod's specification."""
    found: Object = next(item for item in pod["containers"] if item["name"] == name)
    return found
