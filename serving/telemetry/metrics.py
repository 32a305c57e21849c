"""The gateway's own Prometheus metrics, all under `moe_serving_`.

Owns names, labels and buckets. Engine metrics (`vllm:*`) stay vLLM's own.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class GatewayMetrics:
    """The metrics of one gateway replica, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "moe_serving_requests",
            "Requests by outcome: the HTTP status sent, cut (ended early by the engine) "
            "or disconnect (the client went away)",
            ("model", "variant", "outcome"),
            registry=self.registry,
        )
        self.leases = Gauge(
            "moe_serving_leases",
            "Leases this gateway holds now",
            ("model", "variant"),
            registry=self.registry,
        )
        self.overhead = Histogram(
            "moe_serving_overhead_seconds",
            "Time a request spent in the gateway before its first byte, engine time excluded",
            ("model", "variant"),
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30),
            registry=self.registry,
        )

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
