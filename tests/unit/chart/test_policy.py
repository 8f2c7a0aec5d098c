"""No pod of the chart may do more than it must: held against every profile and the defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from outrider_chart import PROFILES, Rendered, render

EVERYTHING = {
    "routerSpec": {"apiKey": {"existingSecret": "keys"}, "autoscaling": {"enabled": True}},
    "metrics": {"serviceMonitor": {"enabled": True}},
    "tracing": {"otlpEndpoint": "http://collector:4317"},
    "tls": {"enabled": True, "existingSecret": "pair"},
    "models": {"existingClaim": "models"},
}


@pytest.fixture(params=[*PROFILES, None, "everything"], ids=str)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render("many-nodes", EVERYTHING) if request.param == "everything" else render(request.param)


def test_there_is_something_to_judge(rendered: Rendered) -> None:
    titles = [title for title, _ in rendered.containers()]
    for name in ("router", "supervisor", "ray-head", "ray-worker", "redis", "generate"):
        assert any(title.endswith(f" {name}") for title in titles), titles


def test_no_container_is_privileged_or_root(rendered: Rendered) -> None:
    for title, pod in rendered.pods():
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True, title
        assert context["runAsUser"] >= 100, title
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, title
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), title
    for title, container in rendered.containers():
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False, title
        assert context["readOnlyRootFilesystem"] is True, title
        assert context["capabilities"] == {"drop": ["ALL"]}, title
        assert context.get("runAsNonRoot", True) is True, title
        assert not {"privileged", "runAsUser"} & context.keys(), title


def test_no_container_is_unlimited(rendered: Rendered) -> None:
    for title, container in rendered.containers():
        resources = container["resources"]
        for name in ("cpu", "memory"):
            assert resources["limits"].get(name), f"{title}: {name}"
            assert resources["requests"].get(name), f"{title}: {name}"
    for title, pod in rendered.pods():
        for volume in pod.get("volumes", []):
            if "emptyDir" in volume:
                assert volume["emptyDir"].get("sizeLimit"), f"{title}: {volume['name']}"
            assert "hostPath" not in volume, title


def test_images_are_pinned(rendered: Rendered) -> None:
    for title, container in rendered.containers():
        tag = container["image"].rpartition("/")[2].partition(":")[2]
        assert tag not in ("", "latest"), f"{title}: {container['image']}"


def test_nobody_speaks_to_the_api_server(rendered: Rendered) -> None:
    accounts = {item["metadata"]["name"] for item in rendered.all("ServiceAccount")}
    assert all(item["automountServiceAccountToken"] is False for item in rendered.all("ServiceAccount"))
    for title, pod in rendered.pods():
        assert pod["automountServiceAccountToken"] is False, title
        assert pod["enableServiceLinks"] is False, title
        assert pod["serviceAccountName"] in accounts, title
    kinds = {item["kind"] for item in rendered.objects}
    assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}


def test_secrets_come_from_secrets(rendered: Rendered) -> None:
    """Passwords and tokens are references to them, or files; nothing of one is in the settings or in arguments."""
    for title, container in rendered.containers():
        for variable in container.get("env", []):
            if (
                any(word in variable["name"] for word in ("PASSWORD", "TOKEN", "AUTH"))
                and "MODE" not in variable["name"]
            ):
                assert "secretKeyRef" in variable.get("valueFrom", {}), f"{title}: {variable['name']}"
    [secret] = rendered.all("Secret")
    shown = [item for item in rendered.objects if item["kind"] != "Secret"]
    assert secret["stringData"]["password"] not in json.dumps(shown)
    redis = yaml.safe_load(rendered.settings)["redis"]
    assert "@" not in redis["url"]
    assert redis["password_file"].startswith("/")


def test_what_is_referred_to_is_there(rendered: Rendered) -> None:
    """Keys of secrets that the chart makes, and its config maps."""
    secrets = {item["metadata"]["name"]: item["stringData"] for item in rendered.all("Secret")}
    maps = {item["metadata"]["name"] for item in rendered.all("ConfigMap")}
    checked = 0
    for title, container in rendered.containers():
        for variable in container.get("env", []):
            reference = variable.get("valueFrom", {}).get("secretKeyRef", {})
            if reference.get("name") in secrets:
                assert reference["key"] in secrets[reference["name"]], f"{title}: {variable['name']}"
                checked += 1
    assert checked >= 2
    for title, pod in rendered.pods():
        for volume in pod.get("volumes", []):
            assert volume.get("configMap", {"name": next(iter(maps))})["name"] in maps, title


def test_every_long_running_container_is_probed(rendered: Rendered) -> None:
    for title, container in rendered.containers():
        if title.endswith((" generate", " supervisor")):
            continue
        assert {"livenessProbe", "readinessProbe"} <= container.keys(), title
    for title, container in rendered.containers():
        if title.endswith(" supervisor"):
            assert {"livenessProbe", "startupProbe"} <= container.keys(), title
        if title.endswith(" generate"):
            assert not {"livenessProbe", "readinessProbe"} & container.keys(), "it ends by itself"


def selected(rendered: Rendered, selector: dict[str, Any]) -> Iterator[str]:
    """Names of the components whose pods a selector takes."""
    templates = [rendered.one("Deployment"), rendered.one("StatefulSet")]
    spec = rendered.one("RayCluster")["spec"]
    all_labels = [item["spec"]["template"]["metadata"]["labels"] for item in templates]
    all_labels += [
        group["template"]["metadata"]["labels"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])
    ]
    all_labels += [item["metadata"]["labels"] for item in rendered.all("Pod")]
    for labels in all_labels:
        wanted = selector.get("matchLabels", {}).items() <= labels.items()
        rules = selector.get("matchExpressions", [])
        if wanted and all(labels.get(rule["key"]) in rule["values"] for rule in rules):
            yield labels["app.kubernetes.io/component"]


def test_every_pod_is_behind_a_network_policy(rendered: Rendered) -> None:
    covered = set()
    for policy in rendered.all("NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        covered |= set(selected(rendered, policy["spec"]["podSelector"]))
    assert covered == set(selected(rendered, {}))


def test_redis_and_ray_are_reached_by_the_release_alone(rendered: Rendered) -> None:
    for name in ("-redis", "-ray"):
        for rule in rendered.one("NetworkPolicy", name)["spec"]["ingress"]:
            if rule.get("ports") == [{"port": 9090}]:
                continue  # metrics
            assert rule["from"]
            for peer in rule["from"]:
                assert peer.keys() == {"podSelector"}
                assert set(selected(rendered, peer["podSelector"])) <= {"router", "head", "target", "draft"}


def test_pods_mount_what_they_name_and_name_what_they_mount(rendered: Rendered) -> None:
    claims = {item["metadata"]["name"] for item in rendered.one("StatefulSet")["spec"].get("volumeClaimTemplates", [])}
    for title, pod in rendered.pods():
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        mounts = {mount["name"] for box in pod["containers"] for mount in box.get("volumeMounts", [])}
        assert volumes <= mounts, title
        assert mounts <= volumes | (claims if "StatefulSet" in title else set()), title
