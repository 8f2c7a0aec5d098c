"""Everything that the chart renders is what Kubernetes and KubeRay take; wrong values are refused by name."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from outrider_chart import CHART, PROFILES, ROOT, render, run_helm, template

kubernetes_validate = pytest.importorskip("kubernetes_validate")

KUBERNETES = ("1.28", "1.37")
# Objects whose schema is not Kubernetes' own.
FOREIGN = ("ray.io", "monitoring.coreos.com", "cert-manager.io")
EVERYTHING: dict[str, Any] = {
    "models": {"create": True},
    "routerSpec": {
        "apiKey": {"existingSecret": "keys"},
        "autoscaling": {"enabled": True},
        "replicaCount": 2,
    },
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True},
        "dashboards": {"enabled": True},
    },
    "tls": {"enabled": True, "requireClientCertificate": True, "certManager": {"issuerName": "ca"}},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {}}],
        "monitoring": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        "extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
    },
    "commonLabels": {"team": "serving"},
    "imagePullSecrets": [{"name": "registry"}],
}
# The other ways: what others made, and a Redis of one's own.
ELSEWHERE: dict[str, Any] = EVERYTHING | {
    "models": {"existingClaim": "models"},
    "tls": {"enabled": True, "requireClientCertificate": True, "existingSecret": "pair"},
    "test": {"clientCertificateSecret": "client"},
    "redis": {
        "enabled": False,
        "auth": {"existingSecret": "redis"},
        "external": {
            **{"host": "redis.example.org", "database": 3, "username": "outrider"},
            "tls": {"enabled": True, "caSecretName": "redis-ca"},
        },
    },
    "rayCluster": {"auth": {"existingSecret": "token"}},
    "tracing": {"otlpEndpoint": "https://collector.example.org:4317", "sampleRatio": 0.5},
    "extraEnv": [
        {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ],
}
CASES = [
    *((profile, {}) for profile in PROFILES),
    (None, {}),
    ("many-nodes", EVERYTHING),
    ("many-nodes", ELSEWHERE),
]
NAMES = [*PROFILES, "defaults", "everything", "everything-elsewhere"]


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    """The validator reads megabytes for each object otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kubernetes_validate.utils, "schema_contents", functools.cache(kubernetes_validate.utils.schema_contents)
        )
        yield


@pytest.mark.parametrize(("profile", "values"), CASES, ids=NAMES)
def test_kubernetes_takes_what_is_rendered(profile: str | None, values: dict[str, Any]) -> None:
    for version in KUBERNETES:
        for item in render(profile, values).objects:
            if not item["apiVersion"].startswith(FOREIGN):
                kubernetes_validate.validate(item, version, strict=True)


def closed(schema: Any) -> Any:
    """The schema, with keys refused that it does not name: the API server would drop them in silence."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if "properties" in inner and not schema.get("x-kubernetes-preserve-unknown-fields"):
        inner.setdefault("additionalProperties", False)
    return inner


@pytest.fixture(scope="module")
def ray_cluster_schema() -> jsonschema.Draft7Validator:
    schema = json.loads((Path(__file__).parent / "raycluster.v1.schema.json").read_text())
    # The metadata of objects, of themselves and in templates, is Kubernetes' own and open there.
    return jsonschema.Draft7Validator(closed(schema))


@pytest.mark.parametrize(("profile", "values"), CASES, ids=NAMES)
def test_kuberay_takes_the_ray_cluster(
    ray_cluster_schema: jsonschema.Draft7Validator, profile: str | None, values: dict[str, Any]
) -> None:
    item = render(profile, values).one("RayCluster")
    item = json.loads(json.dumps(item)) | {"metadata": {}}
    for group in (item["spec"]["headGroupSpec"], *item["spec"]["workerGroupSpecs"]):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": group["template"]["spec"]},
            "1.34",
            True,
        )
    errors = [
        f"{'.'.join(map(str, error.path))}: {error.message[:200]}" for error in ray_cluster_schema.iter_errors(item)
    ]
    assert errors == []


def test_the_schema_of_kuberay_refuses_a_key_that_it_does_not_know(
    ray_cluster_schema: jsonschema.Draft7Validator,
) -> None:
    item = json.loads(json.dumps(render("cpu-trial").one("RayCluster"))) | {"metadata": {}}
    item["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["imagePolicy"] = "Always"
    assert [error for error in ray_cluster_schema.iter_errors(item)]


@pytest.mark.parametrize("profile", PROFILES)
def test_lint_finds_nothing(profile: str) -> None:
    done = run_helm("lint", "--strict", str(CHART), "-f", str(CHART / "profiles" / f"{profile}.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("replicaCounts", {"routerSpec": {"replicaCounts": 2}}),
    ("replicaCount", {"routerSpec": {"replicaCount": 0}}),
    ("tensorParallelSize", {"target": {"tensorParallelSize": "two"}}),
    ("dtype", {"target": {"dtype": "fp16"}}),
    ("verifier", {"speculation": {"verifier": "fast"}}),
    ("placement", {"drafts": [{"name": "a", "model": "/m", "placement": "nearby"}]}),
    ("model", {"drafts": [{"name": "a"}]}),
    ("topm", {"drafts": [{"name": "a", "model": "/m", "topm": 3}]}),
    ("clusterName", {"clusterName": "Mine"}),
    ("memory", {"routerSpec": {"resources": {"limits": {"memory": None}}}}),
    ("digest", {"image": {"digest": "sha256:1"}}),
    # What the templates see.
    ("target.nodes", {"target": {"nodes": 3, "tensorParallelSize": 4}}),
    ("drafts", {"drafts": [{"name": "a", "model": "/m"}, {"name": "a", "model": "/m"}]}),
    ("target.resources.limits.cpu", {"target": {"tensorParallelSize": 16}}),
    ("tls.certManager.issuerName", {"tls": {"enabled": True}}),
    ("level", {"logging": {"level": "verbose"}}),
    ("otlpEndpoint", {"tracing": {"otlpEndpoint": "collector:4317"}}),
    ("sampleRatio", {"tracing": {"sampleRatio": 2}}),
    ("accessModes", {"models": {"create": True, "accessModes": ["ReadWriteOncePod"]}}),
    ("routerSpec.maxNumSeqs", {"routerSpec": {"maxNumSeqs": 65}}),
    (
        "routerSpec.autoscaling.minReplicas",
        {"routerSpec": {"autoscaling": {"enabled": True, "minReplicas": 9, "maxReplicas": 8}}},
    ),
    (
        "targetCPUUtilizationPercentage",
        {"routerSpec": {"autoscaling": {"enabled": True, "customMetrics": False, "targetCPUUtilizationPercentage": 0}}},
    ),
    (
        "routerSpec.drainSeconds",
        {"routerSpec": {"autoscaling": {"enabled": True}, "drainSeconds": 1741}},
    ),
    ("maxPrefillSlowdown", {"routerSpec": {"maxPrefillSlowdown": 0.5}}),
    ("extraEnv", {"extraEnv": [{"value": "x"}]}),
    ("routerSpec.groupPort", {"routerSpec": {"groupPort": 7070}}),
    ("metrics.port", {"metrics": {"port": 6379}}),
    ("metrics.port", {"metrics": {"port": 8080}}),
    ("rayCluster.head.gcsPort", {"rayCluster": {"head": {"gcsPort": 6380}}}),
    ("rayCluster.head.gcsPort", {"rayCluster": {"head": {"gcsPort": 6381}}}),
    ("speculation.promptLookupMin", {"speculation": {"promptLookupMin": 5, "promptLookupMax": 4}}),
    ("target.quantizationGroupSize", {"target": {"quantizationGroupSize": 64}}),
    ("quantizationGroupSize", {"drafts": [{"name": "a", "model": "/m", "quantizationGroupSize": 64}]}),
    ("target.activationDtype", {"target": {"dtype": "float16", "activationDtype": "bfloat16"}}),
    (
        "activationDtype",
        {"drafts": [{"name": "a", "model": "/m", "dtype": "float32", "activationDtype": "bfloat16"}]},
    ),
    (
        "models.accessModes",
        {
            "models": {"create": True, "accessModes": ["ReadWriteOnce"]},
            "target": {"nodes": 2, "tensorParallelSize": 2},
        },
    ),
    (
        "models.accessModes",
        {
            "models": {"existingClaim": "m", "accessModes": ["ReadWriteOnce"]},
            "drafts": [{"name": "a", "model": "/m", "placement": "remote"}],
        },
    ),
    ("redis.auth.existingSecret", {"redis": {"enabled": False, "external": {"host": "r"}}}),
    ("redis.external.tls.enabled", {"redis": {"external": {"tls": {"caSecretName": "ca"}}}}),
    ("redis.external.host", {"redis": {"enabled": False}}),
]


@pytest.mark.parametrize(("key", "values"), WRONG, ids=[f"{i}-{key}" for i, (key, _) in enumerate(WRONG)])
def test_a_wrong_value_is_refused_by_its_name(key: str, values: dict[str, Any]) -> None:
    done = template(None, values)
    assert done.returncode != 0
    assert key in done.stderr


def test_readme_and_schema_are_as_the_values_say() -> None:
    done = subprocess.run(
        [sys.executable, "-P", ROOT / "scripts" / "chart_docs.py", "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
