"""Count what a server does, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_BATCHES = (1, 2, 4, 8, 16, 32)


class ServeMetrics:
    """Hold the counters of one server, apart from those of others in the process."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        labels = ("method", "route", "status")
        self.answers = Counter("strop_http_answers", "HTTP answers", labels, registry=own)
        self.answer_s = Histogram(
            "strop_http_seconds", "Time to an answer", ("route",), buckets=_SECONDS, registry=own
        )
        self.waiting = Gauge("strop_pictures_waiting", "Pictures in the line", registry=own)
        self.pictures = Counter("strop_pictures", "Pictures drawn", ("engine",), registry=own)
        self.refused = Counter(
            "strop_orders_refused", "Orders that the line had no room for", registry=own
        )
        self.cancelled = Counter(
            "strop_orders_cancelled", "Orders that were cancelled", registry=own
        )
        self.failed = Counter(
            "strop_pictures_failed", "Pictures that could not be drawn", registry=own
        )
        self.replicas_lost = Counter(
            "strop_replicas_lost", "Replicas that ended while they drew", registry=own
        )
        self.batch = Histogram(
            "strop_batch_pictures", "Pictures of a batch", buckets=_BATCHES, registry=own
        )
        self.drawing_s = Histogram(
            "strop_batch_seconds", "Time to draw a batch", buckets=_SECONDS, registry=own
        )
        self.waited = Histogram(
            "strop_picture_wait_seconds", "Time in the line", buckets=_SECONDS, registry=own
        )

    def drawn(self, count: int, seconds: float, is_eager: bool) -> None:
        """Note a batch."""
        self.pictures.labels("eager" if is_eager else "strop").inc(count)
        self.batch.observe(count)
        self.drawing_s.observe(seconds)

    def text(self) -> bytes:
        """Return all of it in the text format of Prometheus."""
        return generate_latest(self.registry)
