"""Each template: what values change in it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from outrider.cluster.config import ClusterConfig, parse_config
from outrider.cluster.metrics import SUPERVISOR
from outrider.cluster.placement import NodeFacts, draft_node, plan_placement, shortage
from outrider.router.metric_names import FRONTEND, ROUTER
from outrider.workers.draft.metrics import DRAFT
from outrider.workers.target.metrics import RANK
from outrider_adapter_rules import adapter_rules
from outrider_chart import CHART, PROFILES, ROOT, Rendered, container, render, run_helm, template

# What the processes tell; dashboards and alerts ask for no other.
METRICS = {metric.name for metric in (*ROUTER, *RANK, *DRAFT, *SUPERVISOR)}
TLS: dict[str, Any] = {"tls": {"enabled": True, "existingSecret": "pair"}}
MUTUAL_TLS: dict[str, Any] = {"tls": {**TLS["tls"], "requireClientCertificate": True}}


def config_of(rendered: Rendered) -> ClusterConfig:
    return parse_config(rendered.settings, base=ROOT)


# ---- settings ----


@pytest.mark.parametrize("profile", [*PROFILES, None])
def test_the_program_takes_the_settings(profile: str | None) -> None:
    config = config_of(render(profile))
    assert config.redis.url == "redis://demo-outrider-redis:6379/0"
    assert config.redis.password_file == "/etc/outrider-redis/password"
    assert config.redis.username is config.redis.ca_certs is None
    assert config.ray.address == "127.0.0.1:6379"
    assert config.router.host == "0.0.0.0"


def test_every_value_of_an_engine_arrives() -> None:
    mine = {
        **{"dtype": "float32", "device": "cpu", "quantization": "int8", "quantizationGroupSize": 64},
        **{
            "activationDtype": "bfloat16",
            "kvCacheDtype": "bfloat16",
            "maxModelLen": 4096,
            "blockSize": 32,
            "numKvBlocks": 100,
        },
        **{"maxNumBatchedTokens": 512, "maxNumSeqs": 32, "numThreads": 3},
    }
    draft = {"name": "a", "model": "/m/draft", "topM": 32, "maxNumTokens": 8, "replicas": 2}
    values = {
        "target": {"model": "/m/target", "stepTimeoutS": 60.5, "placementStrategy": "SPREAD", "tensorParallelSize": 2}
        | mine,
        "drafts": [draft | mine],
        "speculation": {"numSpeculativeTokens": 6, "verifier": "rejection", "promptLookupMin": 2, "promptLookupMax": 5},
        "routerSpec": {
            **{"maxQueue": 9, "maxNumSeqs": 8, "enablePrefixCaching": False, "defaultTimeoutS": 30.5},
            **{"maxPrefillSlowdown": 1.5, "planAhead": True},
            "http": {"toolCallParser": "llama3_json", "perRequestSpecDecodeMetrics": "none"},
        },
        "clusterName": "mine",
    }
    config = config_of(render(None, values))
    for engine in (config.target, config.drafts[0]):
        assert (engine.dtype, engine.device, engine.quantization, engine.quantization_group_size) == (
            *("float32", "cpu", "int8"),
            64,
        )
        assert engine.activation_dtype == "bfloat16"
        assert (engine.kv_cache_dtype, engine.max_model_len, engine.block_size) == ("bfloat16", 4096, 32)
        assert (engine.num_kv_blocks, engine.max_num_batched_tokens, engine.max_num_seqs) == (100, 512, 32)
        assert engine.num_threads == 3
    assert (config.target.model, config.target.step_timeout_s) == ("/m/target", 60.5)
    assert (config.target.placement_strategy, config.target.tensor_parallel_size) == ("SPREAD", 2)
    assert (config.drafts[0].top_m, config.drafts[0].max_num_tokens, config.drafts[0].replicas) == (32, 8, 2)
    assert config.speculation.lookup_lengths == (2, 5)
    assert (config.speculation.num_speculative_tokens, config.speculation.verifier) == (6, "rejection")
    assert (config.router.max_queue, config.router.max_num_seqs, config.cluster) == (9, 8, "mine")
    assert (config.router.enable_prefix_caching, config.router.default_timeout_s) == (False, 30.5)
    assert (config.router.max_prefill_slowdown, config.router.plan_ahead) == (1.5, True)
    assert (config.router.tool_call_parser, config.router.per_request_spec_decode_metrics) == ("llama3_json", "none")


def test_more_variables_reach_every_container_of_the_program() -> None:
    more = [
        {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ]
    rendered = render("many-nodes", {"extraEnv": more})
    reached = {title.rpartition(" ")[2] for title, box in rendered.containers() if all(v in box["env"] for v in more)}
    assert reached == {title.rpartition(" ")[2] for title, _ in rendered.containers()} - {"redis"}


def test_ports_that_the_program_opens_are_those_of_the_pod() -> None:
    router = config_of(render(None)).router
    ports = {port["name"]: port["containerPort"] for port in container(render(None).router, "router")["ports"]}
    assert ports == {
        "grpc": router.port,
        "http": router.http_port,
        "group": router.group_port,
        "metrics": router.metrics_port,
    }
    off = render(None, {"routerSpec": {"http": {"enabled": False}}})
    assert config_of(off).router.http_port is None
    assert "http" not in {port["name"] for port in container(off.router, "router")["ports"]}
    assert "http" not in {port["name"] for port in off.one("Service", "-router")["spec"]["ports"]}


def test_logs_and_traces_are_as_they_are_wished() -> None:
    config = config_of(render(None))
    assert (config.logging.level, config.logging.format) == ("info", "text")
    assert config.tracing.otlp_endpoint is None
    traced = {"otlpEndpoint": "http://collector.monitoring:4317", "sampleRatio": 0.25}
    rendered = render(None, {"logging": {"level": "debug", "format": "json"}, "tracing": traced})
    config = config_of(rendered)
    assert (config.logging.level, config.logging.format) == ("debug", "json")
    assert config.tracing.model_dump() == {"otlp_endpoint": traced["otlpEndpoint"], "sample_ratio": 0.25}
    for name in ("-router", "-ray"):
        assert {"ports": [{"port": 4317}]} in rendered.one("NetworkPolicy", name)["spec"]["egress"]


def test_key_pair_and_api_keys_are_mounted_where_the_settings_say() -> None:
    values: dict[str, Any] = {
        "routerSpec": {"apiKey": {"existingSecret": "clients", "secretKey": "k"}},
        "tls": {"enabled": True, "existingSecret": "pair", "requireClientCertificate": True},
    }
    rendered = render(None, values)
    router = yaml.safe_load(rendered.settings)["router"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container(rendered.router, "router")["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in rendered.router["volumes"]}
    for field, name in (("ssl_certfile", "tls.crt"), ("ssl_keyfile", "tls.key"), ("ssl_ca_certs", "ca.crt")):
        folder, _, file = router[field].rpartition("/")
        assert file == name
        assert volumes[mounts[folder]]["secret"]["secretName"] == "pair"
    folder, _, file = router["api_key_file"].rpartition("/")
    assert volumes[mounts[folder]]["secret"]["items"] == [{"key": "k", "path": file}]


# ---- routers ----


def test_a_router_gets_its_time_to_drain() -> None:
    rendered = render(None, {"routerSpec": {"drainSeconds": 300}})
    box = container(rendered.router, "router")
    assert "--grace=300" in box["args"]
    assert box["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    assert rendered.router["terminationGracePeriodSeconds"] > 305
    at_once = render(None, {"routerSpec": {"preStopSeconds": 0}})
    assert "lifecycle" not in container(at_once.router, "router")


def test_a_roll_out_takes_no_router_before_another_is_there() -> None:
    strategy = render(None).one("Deployment")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


@pytest.mark.parametrize("values", [{}, TLS], ids=["plain", "tls"])
def test_probes_ask_the_plain_port_whatever_clients_speak(values: dict[str, Any]) -> None:
    rendered = render(None, values)
    box = container(rendered.router, "router")
    for probe, path in (("livenessProbe", "/livez"), ("startupProbe", "/livez"), ("readinessProbe", "/readyz")):
        assert box[probe]["httpGet"] == {"path": path, "port": "metrics"}
    supervisor = container(rendered.head["template"]["spec"], "supervisor")
    for probe in ("livenessProbe", "startupProbe"):
        assert supervisor[probe]["httpGet"] == {"path": "/livez", "port": "supervisor"}
    assert supervisor["ports"] == [{"name": "supervisor", "containerPort": 9090}]
    assert config_of(rendered).supervisor.metrics_port == 9090
    # The head's service would not know the head, and no node would find it, until the target serves on those nodes.
    assert "readinessProbe" not in supervisor


def test_routers_spread_and_are_never_all_evicted() -> None:
    rendered = render(None)
    keys = [rule["topologyKey"] for rule in rendered.router["topologySpreadConstraints"]]
    assert keys == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
    budget = rendered.one("PodDisruptionBudget")["spec"]
    labels = rendered.one("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    off = render(None, {"routerSpec": {"topologySpread": False, "pdb": {"enabled": False}}})
    assert "topologySpreadConstraints" not in off.router
    assert off.all("PodDisruptionBudget") == []


def test_a_roll_out_has_not_failed_while_the_target_may_still_load() -> None:
    values = {"rayCluster": {"roomTimeoutSeconds": 700}, "target": {"loadTimeoutSeconds": 900}}
    assert render(None, values).one("Deployment")["spec"]["progressDeadlineSeconds"] == 1600


def scales_by(**spec: Any) -> list[dict[str, Any]]:
    rendered = render(None, {"routerSpec": {"autoscaling": {"enabled": True, **spec}}})
    scaler = rendered.one("HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"]["name"] == rendered.one("Deployment")["metadata"]["name"]
    assert "replicas" not in rendered.one("Deployment")["spec"]  # or each upgrade would undo the scaler's number
    metrics: list[dict[str, Any]] = scaler["metrics"]
    return metrics


def test_routers_scale_by_requests_latency_and_cpu() -> None:
    *pods, cpu = scales_by(targetTimeToFirstTokenMs=1500)
    metrics = {item["pods"]["metric"]["name"]: item["pods"]["target"]["averageValue"] for item in pods}
    assert metrics == {"outrider_num_requests_open": "64", "outrider_time_to_first_token_seconds_mean": "1500m"}
    assert metrics.keys() == {rule.name for rule in adapter_rules()}
    # What every router tells, whether or not it owns the target: the scaler takes a mean over all of them.
    frontend = {metric.name for metric in FRONTEND}
    assert {re.sub("_mean$", "", name) for name in metrics} <= frontend
    assert cpu["containerResource"]["container"] == container(render(None).router, "router")["name"]
    assert cpu["containerResource"]["target"] == {"type": "Utilization", "averageUtilization": 80}
    assert scales_by(customMetrics=False) == [cpu]
    assert [item["type"] for item in scales_by(targetCPUUtilizationPercentage=0)] == ["Pods", "Pods"]
    assert render(None).all("HorizontalPodAutoscaler") == []


def test_services_lead_to_the_routers() -> None:
    rendered = render(None)
    service = rendered.one("Service", "-router")["spec"]
    template = rendered.one("Deployment")["spec"]["template"]
    assert service["selector"].items() <= template["metadata"]["labels"].items()
    assert [(port["targetPort"], port["appProtocol"]) for port in service["ports"]] == [
        ("grpc", "kubernetes.io/h2c"),
        ("http", "http"),
    ]
    secure = render(None, TLS).one("Service", "-router")["spec"]
    assert [port["appProtocol"] for port in secure["ports"]] == ["https", "https"]


def test_metrics_are_behind_services_of_their_own() -> None:
    """Clients may come from anywhere; nobody but the release and Prometheus is to read these."""
    rendered = render(None, {"routerSpec": {"serviceType": "LoadBalancer"}})
    for part, pod in (
        ("router", rendered.one("Deployment")["spec"]["template"]),
        ("supervisor", rendered.head["template"]),
    ):
        service = rendered.one("Service", f"-{part}-metrics")["spec"]
        assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
        assert service["selector"].items() <= pod["metadata"]["labels"].items()
        [port] = service["ports"]
        named = [
            p for box in pod["spec"]["containers"] for p in box.get("ports", []) if p["name"] == port["targetPort"]
        ]
        assert [each["containerPort"] for each in named] == [9090]
    assert {port["name"] for port in rendered.one("Service", "-router")["spec"]["ports"]} == {"grpc", "http"}


def test_only_routers_reach_the_port_of_the_group() -> None:
    rules = render(None).one("NetworkPolicy", "-router")["spec"]["ingress"]
    [rule] = [rule for rule in rules if {"port": 7071} in rule["ports"]]
    assert rule["ports"] == [{"port": 7071}]
    [peer] = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"


# ---- Ray ----


def test_the_supervisor_is_a_process_of_the_heads_node() -> None:
    pod = render(None).head["template"]["spec"]
    head, supervisor = container(pod, "ray-head"), container(pod, "supervisor")
    assert pod["containers"][0] is head  # the one that KubeRay fills in
    assert pod["shareProcessNamespace"] is True
    shared = {mount["mountPath"] for mount in head["volumeMounts"]} & {
        m["mountPath"] for m in supervisor["volumeMounts"]
    }
    assert {"/tmp", "/dev/shm"} <= shared
    token = next(item for item in supervisor["env"] if item["name"] == "RAY_AUTH_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "demo-outrider", "key": "auth_token"}


def test_an_actor_of_ray_is_never_on_the_head() -> None:
    assert render(None).head["resources"] == {"CPU": "0"}


def test_ray_waits_until_target_and_drafts_have_left() -> None:
    rendered = render(None, {"rayCluster": {"drainSeconds": 33}})
    for pod in (rendered.head["template"]["spec"], rendered.workers()["target"]["template"]["spec"]):
        assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "33"]
        assert pod["terminationGracePeriodSeconds"] > 33


def test_fault_tolerance_of_the_control_store_needs_redis() -> None:
    spec = render(None).one("RayCluster")["spec"]
    assert spec["gcsFaultToleranceOptions"]["redisAddress"] == "demo-outrider-redis:6379"
    assert "gcsFaultToleranceOptions" not in render("cpu-trial").one("RayCluster")["spec"]


def test_ray_is_made_anew_for_changes_of_target_or_drafts_only() -> None:
    def checksum(values: dict[str, Any]) -> tuple[str, str]:
        rendered = render(None, values)
        router = rendered.one("Deployment")["spec"]["template"]["metadata"]["annotations"]["checksum/settings"]
        return rendered.head["template"]["metadata"]["annotations"]["checksum/settings"], router

    before = checksum({})
    queue = checksum({"routerSpec": {"maxQueue": 7}})
    assert queue[0] == before[0]
    assert queue[1] != before[1]
    assert checksum({"target": {"maxNumSeqs": 65}})[0] != before[0]


def nodes_of(rendered: Rendered) -> list[NodeFacts]:
    """The Ray nodes that KubeRay would start: resources of the groups, CPUs and GPUs of the limits."""
    nodes = [NodeFacts("head", "", 1, {"CPU": 0.0}, {"CPU": 0.0})]
    for name, group in rendered.workers().items():
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        has = {"CPU": float(limits["cpu"]), "GPU": float(limits.get("nvidia.com/gpu", 0))}
        has |= {key: float(amount) for key, amount in group["resources"].items()}
        nodes += [NodeFacts(f"{name}-{index}", "", 1, has, has) for index in range(group["replicas"])]
    return nodes


@pytest.mark.parametrize("profile", PROFILES)
def test_the_program_finds_room_for_everything(profile: str) -> None:
    """Ranks fit on the target's pods, each draft on its own pool's, and no GPU is left over."""
    rendered = render(profile)
    nodes, config = nodes_of(rendered), config_of(rendered)
    placement = plan_placement(config, num_gpus=sum(node.total["GPU"] for node in nodes[1:]))
    assert shortage(placement.bundles, nodes) is None
    wanted = sum(bundle.get("GPU", 0) for bundle in placement.bundles)
    targets = [node.node_id for node in nodes if node.node_id.startswith("target")]
    for seat in placement.drafts:
        if seat.pool.placement == "remote":
            wanted += seat.needs.get("GPU", 0)
            where = draft_node("remote", seat.needs, nodes, targets)
            assert where is not None
            assert where.startswith(f"draft-{seat.pool.name}-")
    assert wanted == sum(node.total.get("GPU", 0) for node in nodes)


# ---- draft placement ----


def pools(placement: str, **more: Any) -> Rendered:
    return render(None, {"drafts": [{"name": "a", "model": "/m", "placement": placement, **more}]})


def test_a_draft_on_the_same_node_takes_no_pod_of_its_own() -> None:
    rendered = pools("sameNode", replicas=2)
    assert list(rendered.workers()) == ["target"]
    limits = rendered.workers()["target"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "3"  # one rank, two drafts
    assert config_of(rendered).drafts[0].placement == "sameNode"


@pytest.mark.parametrize(
    ("placement", "kind", "key"),
    [
        ("sameZone", "podAffinity", "topology.kubernetes.io/zone"),
        ("remote", "podAntiAffinity", "kubernetes.io/hostname"),
    ],
)
def test_a_draft_elsewhere_is_placed_in_respect_of_the_target(placement: str, kind: str, key: str) -> None:
    rendered = pools(placement, replicas=3, nodeSelector={"gpu": "small"}, tolerations=[{"operator": "Exists"}])
    group = rendered.workers()["draft-a"]
    pod = group["template"]["spec"]
    [rule] = pod["affinity"][kind]["requiredDuringSchedulingIgnoredDuringExecution"]
    target = rendered.workers()["target"]["template"]["metadata"]["labels"]
    assert list(pod["affinity"]) == [kind]
    assert rule["topologyKey"] == key
    assert rule["labelSelector"]["matchLabels"].items() <= target.items()
    assert not rule["labelSelector"]["matchLabels"].items() <= group["template"]["metadata"]["labels"].items()
    assert (group["replicas"], pod["nodeSelector"], pod["tolerations"]) == (
        3,
        {"gpu": "small"},
        [{"operator": "Exists"}],
    )
    assert group["labels"]["outrider.io/role"] == "draft"
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    draft = config_of(rendered).drafts[0]
    assert draft.resources == {"draft-a": 1}
    assert group["resources"] == {"draft-a": "1"}


def test_a_draft_on_cpus_asks_for_no_gpu() -> None:
    group = pools("remote", device="cpu").workers()["draft-a"]
    assert "nvidia.com/gpu" not in group["template"]["spec"]["containers"][0]["resources"]["limits"]


# ---- Redis, models, certificate ----


def test_another_redis_is_named_in_its_place() -> None:
    external = {"host": "redis.data.svc", "database": 3, "username": "outrider"}
    values = {"redis": {"enabled": False, "port": 6390, "external": external, "auth": {"existingSecret": "mine"}}}
    rendered = render(None, values)
    redis = config_of(rendered).redis
    assert (redis.url, redis.username) == ("redis://redis.data.svc:6390/3", "outrider")
    assert rendered.all("StatefulSet") == rendered.all("Secret") == []
    cluster = rendered.one("RayCluster")
    options = cluster["spec"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis.data.svc:6390"
    assert options["redisUsername"] == {"value": "outrider"}
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"]["name"] == "mine"
    assert "annotations" not in cluster["metadata"]  # what Ray left there is to be cleaned
    policies = {item["metadata"]["name"] for item in rendered.all("NetworkPolicy")}
    assert policies == {"demo-outrider-router", "demo-outrider-ray", "demo-outrider-test"}


def test_who_speaks_to_redis_has_its_password_as_a_file() -> None:
    rendered = render(None, {"drafts": [{"name": "a", "model": "/m"}]})
    folder, _, file = str(config_of(rendered).redis.password_file).rpartition("/")
    holders = []
    for title, pod in rendered.pods():
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        for box in pod["containers"]:
            for mount in box.get("volumeMounts", []):
                if mount["mountPath"] == folder:
                    secret = volumes[mount["name"]]["secret"]
                    assert secret["secretName"] == rendered.one("Secret")["metadata"]["name"]
                    assert secret["items"] == [{"key": "password", "path": file}]
                    holders.append(f"{title.rpartition('/')[2].split()[-1]} {box['name']}")
    assert sorted(holders) == [
        "demo-outrider-router router",
        "draft-a ray-worker",
        "head supervisor",
        "target ray-worker",
    ]


def test_a_redis_over_tls_is_trusted_by_its_ca() -> None:
    external = {"host": "r", "tls": {"enabled": True, "caSecretName": "ca", "caSecretKey": "root.pem"}}
    rendered = render(None, {"redis": {"enabled": False, "external": external, "auth": {"existingSecret": "mine"}}})
    redis = config_of(rendered).redis
    assert (redis.url, redis.ca_certs) == ("rediss://r:6379/0", "/etc/outrider-redis-ca/ca.crt")
    assert rendered.one("RayCluster")["spec"]["gcsFaultToleranceOptions"]["redisAddress"] == "rediss://r:6379"
    head_pod = rendered.head["template"]["spec"]
    pods = [rendered.router, head_pod, rendered.workers()["target"]["template"]["spec"]]
    boxes = [box for pod in pods for box in pod["containers"]]
    assert len(boxes) == 4
    for box in boxes:
        assert {mount["mountPath"] for mount in box["volumeMounts"]} >= {"/etc/outrider-redis-ca"}, box["name"]
    for pod in pods:
        [volume] = [volume for volume in pod["volumes"] if volume["name"] == "redis-ca"]
        assert volume["secret"]["items"] == [{"key": "root.pem", "path": "ca.crt"}]
    assert {"name": "RAY_REDIS_CA_CERT", "value": redis.ca_certs} in container(head_pod, "ray-head")["env"]


def test_a_redis_without_a_password_is_asked_without_one() -> None:
    rendered = render(None, {"redis": {"enabled": False, "external": {"host": "r", "passwordRequired": False}}})
    assert config_of(rendered).redis.url == "redis://r:6379/0"
    assert config_of(rendered).redis.password_file is None
    assert "password" not in json.dumps(rendered.objects).lower()


def test_a_release_with_its_own_redis_goes_without_waiting_for_it() -> None:
    """KubeRay would clean that Redis with a job that needs it, its secret and the service account, all gone by then."""
    annotations = render(None).one("RayCluster")["metadata"]["annotations"]
    assert annotations == {"ray.io/gcs-ft-deletion-timeout": "1"}
    assert "annotations" not in render("cpu-trial").one("RayCluster")["metadata"]


def test_the_small_redis_keeps_its_data_where_it_is_told_to() -> None:
    kept = render(None).one("StatefulSet")["spec"]
    assert kept["volumeClaimTemplates"][0]["metadata"]["name"] == "data"
    assert "volumeClaimTemplates" not in render("cpu-trial").one("StatefulSet")["spec"]


@pytest.mark.parametrize(
    ("models", "source"),
    [
        ({"existingClaim": "weights"}, {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}}),
        ({"create": True}, {"persistentVolumeClaim": {"claimName": "demo-outrider-models", "readOnly": True}}),
        ({"volume": {"image": {"reference": "models:1"}}}, {"image": {"reference": "models:1"}}),
    ],
)
def test_models_are_mounted_read_only_wherever_they_are_read(models: dict[str, Any], source: dict[str, Any]) -> None:
    rendered = render(None, {"models": models, "drafts": [{"name": "a", "model": "/models/draft"}]})
    groups = [rendered.head, *rendered.workers().values()]
    for pod in (rendered.router, *(group["template"]["spec"] for group in groups)):
        assert {"name": "models", **source} in pod["volumes"]
        mounts = [m for box in pod["containers"] for m in box["volumeMounts"] if m["name"] == "models"]
        assert mounts == [{"name": "models", "mountPath": "/models", "readOnly": True}]
    assert len(rendered.all("PersistentVolumeClaim")) == ("create" in models)


def test_a_claim_for_one_node_takes_every_pod_there() -> None:
    for profile, values in (
        ("one-gpu", {}),
        (None, {"models": {"existingClaim": "m", "accessModes": ["ReadWriteOnce"]}}),
    ):
        rendered = render(profile, values)
        target = rendered.workers()["target"]["template"]
        assert "affinity" not in target["spec"]
        for pod in (rendered.router, rendered.head["template"]["spec"]):
            [rule] = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert rule["topologyKey"] == "kubernetes.io/hostname"
            assert rule["labelSelector"]["matchLabels"].items() <= target["metadata"]["labels"].items()
    assert "affinity" not in render("many-nodes").router


@pytest.mark.parametrize("profile", ["one-gpu", "one-node-8-gpus"])
def test_where_all_pods_share_a_node_all_pass_its_taints(profile: str) -> None:
    rendered = render(profile)
    tolerations = rendered.workers()["target"]["template"]["spec"].get("tolerations", [])
    for pod in (rendered.router, rendered.head["template"]["spec"]):
        assert pod.get("tolerations", []) == tolerations


def test_cert_manager_makes_the_key_pair() -> None:
    values = {"tls": {"enabled": True, "certManager": {"issuerName": "ca", "dnsNames": ["llm.example.org"]}}}
    rendered = render(None, values)
    certificate = rendered.one("Certificate")["spec"]
    assert certificate["issuerRef"] == {"name": "ca", "kind": "Issuer", "group": "cert-manager.io"}
    assert {"demo-outrider-router.llm.svc", "llm.example.org"} <= set(certificate["dnsNames"])
    volume = next(volume for volume in rendered.router["volumes"] if volume["name"] == "tls")
    assert volume["secret"]["secretName"] == certificate["secretName"]


# ---- who looks at it ----


MONITORED: dict[str, Any] = {
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True},
    }
}


@pytest.mark.parametrize("part", ["router", "supervisor"])
def test_prometheus_finds_routers_and_supervisor(part: str) -> None:
    rendered = render(None, MONITORED)
    monitor = rendered.one("ServiceMonitor", f"-{part}")
    services = [
        item
        for item in rendered.all("Service")
        if monitor["spec"]["selector"]["matchLabels"].items() <= item["metadata"]["labels"].items()
    ]
    assert [item["metadata"]["name"] for item in services] == [f"demo-outrider-{part}-metrics"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in services[0]["spec"]["ports"]]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": f"demo-outrider-{part}"}]


def queries() -> list[str]:
    rendered = render(None, MONITORED)
    found = [rule["expr"] for group in rendered.one("PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    for text in rendered.one("ConfigMap", "-dashboards")["data"].values():
        found += [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]
    return found


def test_dashboards_and_alerts_ask_for_metrics_that_are_promised() -> None:
    found = {name for query in queries() for name in re.findall(r"outrider_\w+", query)}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in found} <= METRICS
    assert len(found) > 20
    assert all(query.count("(") == query.count(")") and query.count("{") == query.count("}") for query in queries())


def test_alerts_are_of_this_release() -> None:
    rules = render(None, MONITORED).one("PrometheusRule")["spec"]["groups"][0]["rules"]
    assert len(rules) >= 4
    for rule in rules:
        assert re.search(r'job="demo-outrider-(router|supervisor)", namespace="llm"', rule["expr"])
        assert rule["annotations"].keys() == {"summary", "description"}


def test_each_dashboard_is_grafanas() -> None:
    for path in sorted((CHART / "dashboards").glob("*.json")):
        board = json.loads(path.read_text())
        assert {"uid", "title", "panels", "templating", "schemaVersion"} <= board.keys()
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)


def test_without_a_wish_nobody_looks() -> None:
    kinds = {item["kind"] for item in render(None).objects}
    assert not kinds & {"ServiceMonitor", "PrometheusRule"}


# ---- names ----


def test_long_names_are_cut_where_parts_still_fit() -> None:
    done = template(None, {"fullnameOverride": "a" * 60})
    objects = [item for item in yaml.safe_load_all(done.stdout) if item]
    assert max(len(item["metadata"]["name"]) for item in objects) <= 63
    assert next(item for item in objects if item["kind"] == "RayCluster")["metadata"]["name"] == "a" * 40


def test_helm_test_asks_the_service() -> None:
    rendered = render(None)
    pod = rendered.one("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    box = container(pod["spec"], "generate")
    environment = {item["name"]: item["value"] for item in box["env"]}
    service = rendered.one("Service", "-router")
    port = next(port["port"] for port in service["spec"]["ports"] if port["name"] == "grpc")
    assert environment["OUTRIDER_ADDRESS"] == f"{service['metadata']['name']}:{port}"
    assert "OUTRIDER_CA_CERTS" not in environment


def test_helm_test_has_a_key_and_the_ca() -> None:
    rendered = render(None, {**TLS, "routerSpec": {"apiKey": {"existingSecret": "keys"}}})
    pod = rendered.one("Pod")["spec"]
    box = container(pod, "generate")
    mounts = {mount["mountPath"]: mount["name"] for mount in box["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    ca = next(item["value"] for item in box["env"] if item["name"] == "OUTRIDER_CA_CERTS")
    folder, _, file = ca.rpartition("/")
    # The CA and no private key.
    assert volumes[mounts[folder]]["secret"]["items"] == [{"key": "ca.crt", "path": file}]
    assert volumes[mounts["/etc/outrider-api-keys"]]["secret"]["secretName"] == "keys"
    assert "OUTRIDER_CLIENT_CERT" not in {item["name"] for item in box["env"]}


@pytest.mark.parametrize("given", ["", "of-a-client"])
def test_helm_test_shows_a_certificate_where_one_is_wanted(given: str) -> None:
    rendered = render(None, {**MUTUAL_TLS, "test": {"clientCertificateSecret": given}})
    pod = rendered.one("Pod")["spec"]
    box = container(pod, "generate")
    mounts = {mount["mountPath"]: mount["name"] for mount in box["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    environment = {item["name"]: item["value"] for item in box["env"]}
    for variable, key in (("OUTRIDER_CLIENT_CERT", "tls.crt"), ("OUTRIDER_CLIENT_KEY", "tls.key")):
        folder, _, file = environment[variable].rpartition("/")
        secret = volumes[mounts[folder]]["secret"]
        assert secret["secretName"] == (given or "pair")
        assert {"key": key, "path": file} in secret["items"]


# ---- notes ----


def notes(values: dict[str, Any]) -> str:
    words = ["--set-json", f"target={json.dumps({'model': '/models/big'})}"]
    for key, value in values.items():
        words += ["--set-json", f"{key}={json.dumps(value)}"]
    done = run_helm("install", "demo", str(CHART), "-n", "llm", "--dry-run=client", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:\n")[2]


def test_the_notes_have_a_first_request_that_is_right() -> None:
    text = notes({})
    assert "curl http://localhost:8000/v1/completions" in text
    assert '"model": "big"' in text
    assert "outrider generate --address localhost:7070 -p 'The with statement'" in text
    assert "helm test demo -n llm --logs" in text
    assert "delete raycluster" not in text
    text = notes({**TLS, "routerSpec": {"apiKey": {"existingSecret": "keys"}, "http": {"servedModelName": ["m"]}}})
    assert "curl --cacert ca.crt https://localhost:8000/v1/completions" in text
    assert '-H "Authorization: Bearer $OUTRIDER_API_KEY"' in text
    assert '"model": "m"' in text
    assert "--ca-certs ca.crt" in text
    assert "get secret pair -o jsonpath='{.data.ca\\.crt}'" in text
    assert "--cert" not in text.replace("--ca-certs", "")
    for given in ("", "of-a-client"):
        text = notes({**MUTUAL_TLS, "test": {"clientCertificateSecret": given}})
        for key, file in (("crt", "client.crt"), ("key", "client.key")):
            assert f"get secret {given or 'pair'} -o jsonpath='{{.data.tls\\.{key}}}' | base64 -d > {file}\n" in text
        assert "curl --cacert ca.crt --cert client.crt --key client.key https://localhost:8000/v1/completions" in text
        assert "--ca-certs ca.crt --client-cert client.crt --client-key client.key -p" in text
    text = notes({"redis": {"enabled": False, "external": {"host": "r"}, "auth": {"existingSecret": "mine"}}})
    assert "kubectl -n llm delete raycluster demo-outrider" in text
