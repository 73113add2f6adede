"""The values on a server's `/metrics` page."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

SCRAPE_TIMEOUT_S = 20.0


def scrape(url: str, timeout_s: float = SCRAPE_TIMEOUT_S) -> dict[str, float]:
    """Every sample by its series name: `name`, or `name{label="value",…}` if it has labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=timeout_s) as response:
        return parse_metrics(response.read().decode())


def parse_metrics(text: str) -> dict[str, float]:
    return {
        _series(sample.name, sample.labels): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _series(name: str, labels: dict[str, str]) -> str:
    return name + ("{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else "")
