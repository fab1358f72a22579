"""One process's metrics: a table of instruments, the OpenTelemetry SDK behind it, Prometheus text in front.

Owns its MeterProvider, so two may live in one process. Names in the table are the exact Prometheus names (``vllm:``
has a colon, which OpenTelemetry has no room for: the SDK sees a dot instead). Every series of the table is there from
the start, as 0, because an autoscaler reads an absent series as "nothing to do". Knows nothing of what is measured.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

DURATION_BUCKETS_S = tuple(0.01 * 2**k for k in range(14))
"""gen_ai.server.request.duration: 0.01 to 81.92 s."""
TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""gen_ai.server.time_to_first_token."""
TPOT_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""gen_ai.server.time_per_output_token."""
EXPOSED_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Of what should hide behind work and shows only where it does not: from a step's part to many steps."""
TOKEN_BUCKETS = tuple(float(4**k) for k in range(14))
"""gen_ai.client.token.usage: powers of 4."""

Labels = tuple[str, ...]
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Kind(StrEnum):
    """COUNTER only grows and gets ``_total``; GAUGE goes both ways; HISTOGRAM counts into buckets."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Instrument:
    """A row of a table of metrics.

    ``name`` is the Prometheus name, unit included (a counter without its ``_total``). ``series`` lists the values of
    ``labels`` that are known beforehand; an instrument without labels has the one empty series.
    """

    name: str
    kind: Kind
    help: str
    unit: str = "1"
    """UCUM, for OpenTelemetry: s, By, {token}, {block}, {request}."""
    labels: Labels = ()
    series: tuple[Labels, ...] = ()
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind is Kind.HISTOGRAM) != bool(self.buckets):
            raise ValueError(f"{self.name}: buckets belong to histograms, and to each of them")
        if any(len(values) != len(self.labels) for values in self.series):
            raise ValueError(f"{self.name}: each series needs a value for each of {self.labels}")

    @property
    def first_series(self) -> tuple[Labels, ...]:
        return self.series if self.labels else ((),)


class Metrics:
    """The live values of a table. Not thread-safe: written and rendered by one event loop."""

    def __init__(self, table: Sequence[Instrument], resource: Mapping[str, str]) -> None:
        self._table = {row.name: row for row in table}
        if len(self._table) != len(table):
            raise ValueError("two instruments have the same name")
        self._totals = {row.name: dict.fromkeys(row.first_series, 0.0) for row in table if row.kind is Kind.COUNTER}
        self._gauges = {row.name: dict.fromkeys(row.first_series, 0.0) for row in table if row.kind is Kind.GAUGE}
        self._watched: dict[str, dict[Labels, Callable[[], float]]] = {row.name: {} for row in table}
        reader = InMemoryMetricReader()
        self._provider = MeterProvider([reader], Resource(dict(resource)), shutdown_on_exit=False)
        meter = self._provider.get_meter("kvoy")
        self._histograms = {
            row.name: meter.create_histogram(
                _otel_name(row.name), row.unit, row.help, explicit_bucket_boundaries_advisory=row.buckets
            )
            for row in table
            if row.kind is Kind.HISTOGRAM
        }
        for row in table:
            callbacks = [_Observer(self, row)]
            if row.kind is Kind.COUNTER:
                meter.create_observable_counter(_otel_name(row.name), callbacks, row.unit, row.help)
            elif row.kind is Kind.GAUGE:
                meter.create_observable_gauge(_otel_name(row.name), callbacks, row.unit, row.help)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(table, reader))

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Adds to a counter."""
        key, totals = self._key(name, labels), self._totals[name]
        totals[key] = totals.get(key, 0.0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge."""
        self._gauges[name][self._key(name, labels)] = value

    def record(self, name: str, value: float, **labels: str) -> None:
        """Counts a value into a histogram."""
        self._key(name, labels)
        self._histograms[name].record(value, labels)

    def watch(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """Lets ``read`` tell the value of a gauge, or the running total of a counter, each time it is asked for."""
        if self._table[name].kind is Kind.HISTOGRAM:
            raise ValueError(f"{name} is a histogram: its values are recorded, not watched")
        self._watched[name][self._key(name, labels)] = read

    def render(self) -> bytes:
        """Prometheus text (CONTENT_TYPE)."""
        return generate_latest(self._registry)

    def close(self) -> None:
        self._provider.shutdown()

    def observations(self, name: str) -> dict[Labels, float]:
        """The present value of each series of a counter or gauge."""
        values = dict(self._totals.get(name) or self._gauges.get(name) or {})
        return values | {key: read() for key, read in self._watched[name].items()}

    def _key(self, name: str, labels: Mapping[str, str]) -> Labels:
        expected = self._table[name].labels
        if set(labels) != set(expected):
            raise ValueError(f"{name} has the labels {expected}, not {tuple(labels)}")
        return tuple(labels[label] for label in expected)


class _Observer:
    """What the SDK calls to read a counter or gauge."""

    def __init__(self, metrics: Metrics, row: Instrument) -> None:
        self._metrics, self._row = metrics, row

    def __call__(self, _options: CallbackOptions) -> Iterator[Observation]:
        for values, number in self._metrics.observations(self._row.name).items():
            yield Observation(number, dict(zip(self._row.labels, values, strict=True)))


class _Collector(Collector):
    """Turns what the SDK holds into Prometheus families, under the names of the table and with nothing missing."""

    def __init__(self, table: Sequence[Instrument], reader: InMemoryMetricReader) -> None:
        self._table, self._reader = table, reader

    def collect(self) -> Iterator[Family]:
        points = self._points()
        for row in self._table:
            yield _family(row, points.get(_otel_name(row.name), []))

    def _points(self) -> dict[str, list[NumberDataPoint | HistogramDataPoint]]:
        collected = self._reader.get_metrics_data()
        metrics = [
            metric
            for resource in (collected.resource_metrics if collected else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
        ]
        return {metric.name: [*metric.data.data_points] for metric in metrics}


def _family(row: Instrument, points: Iterable[NumberDataPoint | HistogramDataPoint]) -> Family:
    by_labels = {tuple(str((point.attributes or {})[label]) for label in row.labels): point for point in points}
    if row.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(row.name, row.help, labels=row.labels)
        for values in dict.fromkeys([*row.first_series, *by_labels]):
            buckets, total = _buckets(row, by_labels.get(values))
            histogram.add_metric(values, buckets, total)
        return histogram
    family_type = CounterMetricFamily if row.kind is Kind.COUNTER else GaugeMetricFamily
    family = family_type(row.name, row.help, labels=row.labels)
    for values, point in by_labels.items():
        family.add_metric(values, point.value if isinstance(point, NumberDataPoint) else 0.0)
    return family


def _buckets(row: Instrument, point: object) -> tuple[list[tuple[str, float]], float]:
    """Cumulative counts by upper bound, and the sum of all values."""
    counts, total = [0] * (len(row.buckets) + 1), 0.0
    if isinstance(point, HistogramDataPoint):
        counts, total = list(point.bucket_counts), float(point.sum)
    running, buckets = 0, []
    for bound, count in zip([*row.buckets, float("inf")], counts, strict=True):
        running += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(running)))
    return buckets, total


def _otel_name(name: str) -> str:
    return name.replace(":", ".")
