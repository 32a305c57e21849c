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
            "Requests by outcome: the HTTP status sent, cut (ended early by the engine), "
            "stalled (a stream that stood still too long) or disconnect (the client went away)",
            ("model", "variant", "outcome"),
            registry=self.registry,
        )
        self.retries = Counter(
            "moe_serving_retries",
            "Requests sent to a second engine, by the error of the first",
            ("model", "variant", "reason"),
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
        self.shadows = Counter(
            "moe_serving_shadow_requests",
            "Repeated requests by outcome: the HTTP status, cut (the engine broke off), skipped "
            "(too many under way), failed (a fault of the gateway's) or ended (with the gateway)",
            ("model", "variant", "outcome"),
            registry=self.registry,
        )
        self.shadow_duration = Histogram(
            "moe_serving_shadow_seconds",
            "Repeated requests that were answered: from sending to the end of the answer",
            ("model", "variant"),
            buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600),
            registry=self.registry,
        )
        self.shadow_tokens = Counter(
            "moe_serving_shadow_output_tokens",
            "Output tokens of repeated requests, of answers that tell their usage",
            ("model", "variant"),
            registry=self.registry,
        )
        self.split_records = Counter(
            "moe_serving_split_records",
            "Requests of an A/B study by what became of their record: written, failed (the folder "
            "cannot be written) or dropped (too many wait to be written)",
            ("study", "outcome"),
            registry=self.registry,
        )

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
