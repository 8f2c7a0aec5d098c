"""The rules of prometheus-adapter on docs/install.md as data."""

from __future__ import annotations

import re
from dataclasses import dataclass

import yaml

from outrider_chart import ROOT

INSTALL_PAGE = ROOT / "docs" / "install.md"


@dataclass(frozen=True)
class AdapterRule:
    """One metric of pods that the adapter offers, and what it asks Prometheus for it."""

    name: str
    series_query: str
    metrics_query: str

    def asked(self, namespace: str, pods: str) -> str:
        """The query for those pods of a namespace (a regular expression), as the adapter fills it in."""
        words = {
            ".Series": re.split(r"[{ ]", self.series_query)[0],
            ".LabelMatchers": f'namespace="{namespace}",pod=~"{pods}"',
            ".GroupBy": "pod",
        }
        return re.sub(r"<<(\.\w+)>>", lambda match: words[match[1]], self.metrics_query)


def adapter_rules() -> list[AdapterRule]:
    """Those of the page's only block that begins with ``rules:``."""
    [block] = re.findall(r"```yaml\n(rules:.*?)```", INSTALL_PAGE.read_text(), re.DOTALL)
    return [
        AdapterRule(rule["name"]["as"], rule["seriesQuery"], rule["metricsQuery"])
        for rule in yaml.safe_load(block)["rules"]
    ]
