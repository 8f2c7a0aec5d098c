"""The program started as Kubernetes would: with the arguments, variables, settings, ports and probes that the chart
renders, clients on TLS with keys.

``outrider_kubelet`` runs the pods of the CPU trial, with two routers and the draft in a pod of its own. What KubeRay
and the cluster's DNS add is done here: ``ray start``, its token, and names of services.
"""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client
from outrider.client._async import CHANNEL_OPTIONS
from outrider.core.errors import Unauthenticated
from outrider_certificates import Files
from outrider_chart import NAME, Rendered, render
from outrider_kubelet import START_TIMEOUT_S, Kubelet, Pod, ray_start, status_of

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(1800)]

KUBERAY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
HEAD = f"{NAME}-head-svc.llm.svc.cluster.local"
KEY = "first-key"
PASSWORD = "p%40/:@?#$(X)w"  # nothing that a URL would bear
VALUES: dict[str, Any] = {
    "target": {"resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"cpu": "1", "memory": "4Gi"}}},
    "drafts": [
        {
            **{"name": "draft", "model": "/opt/outrider/models/tiny/draft", "placement": "remote"},
            **{"device": "cpu", "dtype": "float32", "numThreads": 1},
            "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "2Gi"}},
        }
    ],
    # Streams end in that time on any machine.
    "routerSpec": {"drainSeconds": 600, "preStopSeconds": 1, "apiKey": {"existingSecret": "keys"}, "replicaCount": 2},
    "rayCluster": {"drainSeconds": 0},
    "tls": {"enabled": True, "existingSecret": "pair"},
    "logging": {"format": "json"},
    "redis": {"auth": {"password": PASSWORD}},
}


# Of a stream with some 500 KB, of which a connection that never widens its window takes in 64 KB before they are read.
NARROW = (*CHANNEL_OPTIONS, ("grpc.http2.bdp_probe", 0))
NUM_TOKENS, NUM_CHOICES, NUM_LOGPROBS = 200, 8, 20


class Release:
    """The pods of a release, none of which runs yet."""

    def __init__(self, rendered: Rendered, kubelet: Kubelet, certificates: Files) -> None:
        self.rendered = rendered
        self.kubelet = kubelet
        self.certificates = certificates
        redis = rendered.one("StatefulSet")["spec"]["template"]["spec"]
        self.redis = kubelet.pod("redis", redis, f"{NAME}-redis")
        self.head = kubelet.pod("head", rendered.head["template"]["spec"], HEAD)
        self.workers = {
            name: kubelet.pod(name, group["template"]["spec"]) for name, group in rendered.workers().items()
        }
        self.routers = [
            kubelet.pod("router-0", rendered.router, f"{NAME}-router"),
            kubelet.pod("router-1", rendered.router),
        ]
        self.test = kubelet.pod("test", rendered.one("Pod")["spec"])

    def start_node(self, group: str | None) -> Pod:
        """A node of Ray, as KubeRay starts it: that of a worker group, or the head."""
        if group is None:
            spec, pod, more = self.rendered.head, self.head, ["--head"]
        else:
            spec, pod, more = self.rendered.workers()[group], self.workers[group], [f"--address={HEAD}:6379"]
        box = pod.spec["containers"][0]
        pod.start(box["name"], ray_start(spec, box, *more), KUBERAY)
        return pod

    def client(self, pod: Pod) -> Client:
        return Client(f"{pod.address}:7070", ca_certs=str(self.certificates.ca_certs), api_key=KEY, timeout=60.0)

    def url(self, pod: Pod, path: str) -> str:
        return f"https://{pod.address}:8000{path}"

    @property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.certificates.ca_certs)


@pytest.fixture
def release(tmp_path: Path) -> Iterator[Release]:
    rendered = render("cpu-trial", VALUES)
    pair = {file: "" for file in ("tls.crt", "tls.key", "ca.crt")}
    given = {
        "pair": pair,
        "keys": {"api-keys": f"# of clients\n\n{KEY}\nsecond-key\n"},
        NAME: {"auth_token": KUBERAY["RAY_AUTH_TOKEN"]},
    }
    (tmp_path / "pods").mkdir()
    with Kubelet(rendered, tmp_path / "pods", given) as kubelet:
        # Addresses are known only now.
        addresses = [f"{kubelet.subnet}.{number}" for number in range(1, 10)]
        certificates = Files(tmp_path / "pair", None, f"{NAME}-router", *addresses)
        pair.update({file: (certificates.folder / file).read_text() for file in pair})
        yield Release(rendered, kubelet, certificates)


def test_the_program_runs_as_the_chart_says(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    kubelet, redis, head, routers = release.kubelet, release.redis, release.head, release.routers

    # In no order that helps: the supervisor waits for Ray and for nodes, routers for a target.
    redis.start("redis")
    kubelet.wait_for("Redis is alive", lambda: redis.probed("redis", "livenessProbe"))
    kubelet.wait_for("Redis is ready", lambda: redis.probed("redis", "readinessProbe"))
    head.start("supervisor")
    for router in routers:
        router.start("router")
    kubelet.wait_for("the supervisor waits for Ray", lambda: "waiting for Ray:" in kubelet.logs())
    release.start_node(None)
    for router in routers:
        kubelet.wait_for("a router has started", lambda router=router: router.probed("router", "startupProbe"))
        kubelet.wait_for("a router is alive", lambda router=router: router.probed("router", "livenessProbe"))
    kubelet.wait_for("Ray's head has started", lambda: head.probed("ray-head", "startupProbe"))
    kubelet.wait_for("Ray's head is alive", lambda: head.probed("ray-head", "livenessProbe"))
    kubelet.wait_for("Ray's head is ready", lambda: head.probed("ray-head", "readinessProbe"))
    kubelet.wait_for("the supervisor waits for nodes", lambda: "waiting for nodes of Ray" in kubelet.logs())
    kubelet.wait_for("the supervisor has started", lambda: head.probed("supervisor", "startupProbe"))
    assert not any(router.probed("router", "readinessProbe") for router in routers)

    # The draft's pod is pending, and the target serves all the same.
    target = release.start_node("target")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        kubelet.wait_for(f"{probe} of the target's pod", lambda probe=probe: target.probed("ray-worker", probe))
    for router in routers:
        kubelet.wait_for(f"{router.name} is ready", lambda router=router: router.probed("router", "readinessProbe"))
    kubelet.wait_for("the supervisor is alive", lambda: head.probed("supervisor", "livenessProbe"))
    answer = json.loads(release.test.run("generate").splitlines()[-1])
    assert len(answer["token_ids"]) == 16
    for router in routers:
        refuses_and_answers(release, router)
    for pod, port in ((routers[0], 9090), (head, 9090)):
        with urllib.request.urlopen(f"http://{pod.address}:{port}/metrics", timeout=60) as metrics:
            assert b"\noutrider_" in metrics.read()

    release.start_node("draft-draft")
    with release.client(routers[1]) as client:
        kubelet.wait_for(
            "the routers have the draft", lambda: [each["state"] for each in client.status()["drafts"]] == ["ready"]
        )
    monkeypatch.setattr("outrider.client._async.CHANNEL_OPTIONS", NARROW)
    hand_over(release)
    assert head.stop("supervisor") == 0


def refuses_and_answers(release: Release, router: Pod) -> None:
    """Both doors want TLS and a key."""
    headers = {"Authorization": f"Bearer {KEY}"}
    models = release.url(router, "/v1/models")
    assert status_of(models, 60.0, context=release.context) == 401
    assert status_of(models, 60.0, context=release.context, headers=headers) == 200
    assert status_of(models.replace("https", "http"), 60.0, headers=headers) in (0, 400)
    request = urllib.request.Request(
        release.url(router, "/v1/completions"),
        json.dumps({"model": "target", "prompt": "The with statement", "max_tokens": 8, "temperature": 0}).encode(),
        headers={**headers, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300, context=release.context) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == 8
    with release.client(router) as client:
        assert len(client.generate("The with statement", max_tokens=8, ignore_eos=True).token_ids) == 8
    stranger = Client(f"{router.address}:7070", ca_certs=str(release.certificates.ca_certs), timeout=60.0)
    with stranger, pytest.raises(Unauthenticated, match="key"):
        stranger.generate("The with statement", max_tokens=8)


def hand_over(release: Release) -> None:
    """A roll-out, one router after the other: what runs is finished, and there is always one that takes requests."""
    kubelet = release.kubelet
    for leaving, staying in (release.routers, release.routers[::-1]):
        router = leaving.processes["router"]
        with (
            release.client(leaving) as client,
            client.stream(
                "The with statement",
                max_tokens=NUM_TOKENS,
                n=NUM_CHOICES,
                logprobs=NUM_LOGPROBS,
                ignore_eos=True,
                timeout=START_TIMEOUT_S,
            ) as stream,
        ):
            events = stream.events()
            next(events)
            leaving.terminate("router")
            readyz = f"http://{leaving.address}:9090/readyz"
            kubelet.wait_for(f"{leaving.name} drains", lambda url=readyz: status_of(url, 60.0) == 503)
            # The stream cannot end before it is read.
            assert router.poll() is None, kubelet.logs()
            assert not leaving.probed("router", "readinessProbe")
            assert leaving.probed("router", "livenessProbe")
            for _ in events:
                pass
        choices = stream.completion.choices
        assert [(choice.finish_reason, len(choice.token_ids)) for choice in choices] == NUM_CHOICES * [
            ("length", NUM_TOKENS)
        ]
        kubelet.wait_for(f"{leaving.name} has gone", lambda process=router: process.poll() is not None)
        assert router.returncode == 0, kubelet.logs()
        kubelet.wait_for(f"{staying.name} is ready", lambda pod=staying: pod.probed("router", "readinessProbe"))
        refuses_and_answers(release, staying)
        leaving.start("router")
        kubelet.wait_for(f"{leaving.name} is back", lambda pod=leaving: pod.probed("router", "readinessProbe"))
    for router in release.routers:
        assert router.stop("router") == 0
