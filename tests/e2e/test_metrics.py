"""A real Prometheus reads a real cluster: dashboards, alerts and the page's examples get data from it."""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from outrider.client import Client, OutriderError
from outrider.cluster.metrics import SUPERVISOR
from outrider.router.metric_names import ROUTER
from outrider.workers.draft.metrics import DRAFT
from outrider.workers.target.metrics import RANK
from outrider_adapter_rules import adapter_rules
from outrider_chart import CHART, NAME, render
from outrider_metrics_page import METRICS_PAGE, rows_of
from outrider_promtool import Prometheus, check_rules, promtool_check, running_prometheus

MONITORED = {
    "metrics": {
        "serviceMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboards": {"enabled": True},
    }
}
NAMESPACE = "llm"
INTERVAL = "5s"  # and the time that a scrape may take
WINDOW = "5m"
DEADLINE_S = 180.0


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def names(text: str) -> list[str]:
    return [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]


@contextlib.contextmanager
def traffic(address: str) -> Iterator[None]:
    """Requests, one after the other, until the end of the block."""
    over = threading.Event()
    failures: list[str] = []

    def send() -> None:
        with Client(address, timeout=120) as client:
            while not over.is_set():
                try:
                    client.generate("The with statement " * 8, max_tokens=24, ignore_eos=True)
                except OutriderError as error:
                    failures.append(str(error))
                    return

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join(130)
    assert failures == []


@pytest.fixture(scope="module")
def rule_groups() -> dict[str, Any]:
    groups: dict[str, Any] = render(None, MONITORED).one("PrometheusRule")["spec"]
    return groups


def panel_queries() -> dict[str, str]:
    """By dashboard, panel and legend."""
    return {
        f"{path.stem}: {panel['title']}: {target['refId']}": target["expr"]
        for path in sorted((CHART / "dashboards").glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    }


def asked(query: str) -> str:
    """A query as Grafana asks it."""
    return query.replace("$__rate_interval", WINDOW).replace("$namespace", NAMESPACE)


def has_data(prometheus: Prometheus, query: str) -> bool:
    return any(not math.isnan(float(series["value"][1])) for series in prometheus.query(query))


def test_the_supervisor_tells_of_everybody(running_cluster: Any) -> None:
    cluster = running_cluster
    cluster.wait_until_whole()
    url = cluster.state()["metrics_url"]

    def whole() -> str | None:
        text = read(url)
        ups = re.findall(r"^outrider_(?:rank|draft)_up\{.*\} (\S+)$", text, re.MULTILINE)
        return text if ups == ["1.0", "1.0", "1.0"] else None

    text = cluster.wait_for(whole, "two ranks and a draft answer a scrape")
    told = names(text)
    assert set(told) == {metric.name for metric in (*SUPERVISOR, *RANK, *DRAFT)}
    assert len(told) == len(set(told))
    promtool_check(text)
    steps = re.findall(r'^outrider_target_steps_total\{rank="(\d)"\} (\S+)$', text, re.MULTILINE)
    assert [rank for rank, _ in steps] == ["0", "1"]
    assert 'outrider_build_info{component="draft",draft="draft-0"' in text
    base = url.removesuffix("/metrics")
    assert (read(f"{base}/livez"), read(f"{base}/readyz")) == ("ok\n", "ready\n")

    router = read(cluster.state()["router_metrics_url"])
    assert set(names(router)) == {metric.name for metric in ROUTER}
    promtool_check(router)


def test_rules_are_right(rule_groups: dict[str, Any], tmp_path: Path) -> None:
    assert "SUCCESS" in check_rules(rule_groups, tmp_path)
    broken = json.loads(json.dumps(rule_groups))
    broken["groups"][0]["rules"][0]["expr"] += " )"
    with pytest.raises(AssertionError, match="could not parse expression"):
        check_rules(broken, tmp_path)


def test_every_panel_alert_and_example_gets_data(
    running_cluster: Any, rule_groups: dict[str, Any], tmp_path: Path
) -> None:
    cluster = running_cluster
    cluster.wait_until_whole()
    state = cluster.state()
    rules = tmp_path / "alerts.yaml"
    rules.write_text(json.dumps(rule_groups))
    config = {
        "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": f"{NAME}-{part}",  # as the ServiceMonitor names it
                "static_configs": [
                    {"targets": [urlsplit(url).netloc], "labels": {"namespace": NAMESPACE, "pod": f"{NAME}-{part}-0"}}
                ],
            }
            for part, url in (("router", state["router_metrics_url"]), ("supervisor", state["metrics_url"]))
        ],
    }
    alerts = [rule for group in rule_groups["groups"] for rule in group["rules"]]
    wanted = {title: asked(query) for title, query in panel_queries().items()}
    wanted |= {f"{METRICS_PAGE.name}: {row.name}": row.promql for row in rows_of(METRICS_PAGE)}
    router = f"{NAME}-router-0"
    offered = {f"offered: {rule.name}": rule.asked(NAMESPACE, router) for rule in adapter_rules()}
    wanted |= offered | {f"found: {rule.name}": rule.series_query for rule in adapter_rules()}
    # An alert has nothing to say where all is well; what it looks at must be there.
    selectors = {
        f"{alert['alert']}: {selector}": selector
        for alert in alerts
        for selector in re.findall(r"[a-z_]+\{[^}]*\}", alert["expr"])
    }
    assert len(wanted) > 30
    assert len(selectors) >= len(alerts)
    with running_prometheus(tmp_path, config) as prometheus, traffic(cluster.address):
        deadline = time.monotonic() + DEADLINE_S
        missing = wanted | selectors
        while missing and time.monotonic() < deadline:
            time.sleep(1.0)
            missing = {title: query for title, query in missing.items() if not has_data(prometheus, query)}
        assert missing == {}
        assert not has_data(prometheus, "outrider_no_such_metric_total")
        for query in offered.values():  # to the autoscaler, which wants a number for each pod
            assert [series["metric"] for series in prometheus.query(query)] == [{"pod": router}]
        for alert in alerts:
            firing = prometheus.query(alert["expr"])
            assert firing == [] or alert["labels"]["severity"] != "critical", f"{alert['alert']} fires: {firing}"

        def evaluated() -> bool:
            found = [rule for group in prometheus.api("rules")["groups"] for rule in group["rules"]]
            assert all(rule.get("lastError", "") == "" for rule in found), found
            return len(found) == len(alerts) and all(rule["health"] == "ok" for rule in found)

        cluster.wait_for(evaluated, "every rule was evaluated")
