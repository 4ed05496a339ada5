"""A server's Prometheus counters, by name and label."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metrics:
    """One reading of /metrics. Series of several engines (data parallelism) are summed."""

    totals: Mapping[str, float]  # by sample name, such as vllm:generation_tokens_total
    by_position: Mapping[str, Mapping[int, float]]  # of samples with the label ``position``

    def get(self, name: str) -> float | None:
        """None where the server has no such series."""
        return self.totals.get(name)

    def positions(self, name: str) -> list[float]:
        """By position, from 0; empty where the server has none."""
        found = self.by_position.get(name, {})
        return [found[n] for n in sorted(found)]


def parse(text: str) -> Metrics:
    """Read Prometheus' text format. Raises ValueError where ``text`` is none."""
    from prometheus_client.parser import text_string_to_metric_families

    totals: defaultdict[str, float] = defaultdict(float)
    by_position: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] += sample.value
            if "position" in sample.labels:
                by_position[sample.name][int(sample.labels["position"])] += sample.value
    return Metrics(dict(totals), {name: dict(found) for name, found in by_position.items()})
