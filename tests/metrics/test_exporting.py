"""Figures where programs want them: statistics, Prometheus, OpenTelemetry, loggers.

Reads   registries and exporters of the real libraries.
Writes  nothing.
Never   a made-up client.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest

import outlive
from deadlines import wait_until
from metrics import jobs
from outlive._metrics import families, viewing
from outlive.incident import Stage


def loader_that_ran():
    loader = outlive.DataLoader(
        jobs.Faulty(), batch_size=4, num_workers=2, faults="skip", persistent_workers=True, memory_limit="2GiB"
    )
    batches = iter(loader)
    assert sum(1 for _ in itertools.islice(batches, 16)) == 16
    # A worker counts a batch once it was sent; what is counted when the epoch ends is what a scrape has.
    assert wait_until(
        lambda: all(slot.doing == Stage.IDLE.words for slot in loader.statistics().slots if slot.pid), jobs.DEADLINE_S
    )
    assert next(batches, None) is None
    return loader


def test_a_scrape_has_every_figure_with_its_labels():
    """In a registry of one's own; the same numbers as statistics() has."""
    client = pytest.importorskip("prometheus_client")
    loader = loader_that_ran()
    parser = pytest.importorskip("prometheus_client.parser")
    registry = client.CollectorRegistry()
    registry.register(outlive.PrometheusCollector(pid="own"))

    text = client.generate_latest(registry).decode()
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}

    def value(name: str) -> float:
        (sample,) = families[name].samples
        assert sample.labels["kind"] == "loader"
        assert sample.labels["name"] == "Faulty"
        return sample.value

    told = loader.statistics()
    assert value("outlive_batches") == told.delivered == 16
    assert value("outlive_samples") == told.samples == 62
    assert value("outlive_restarts") == told.restarts == 2
    assert value("outlive_incidents") == 3
    assert value("outlive_breaker_open") == 0
    assert {s.labels["verdict"]: s.value for s in families["outlive_quarantined"].samples} == dict(told.by_verdict)
    fetched = {s.name: s.value for s in families["outlive_fetch_seconds"].samples}
    assert fetched["outlive_fetch_seconds_count"] == sum(told.histograms["fetch"]["counts"]) > 0
    assert fetched["outlive_fetch_seconds_sum"] == pytest.approx(told.histograms["fetch"]["sum"])
    assert {s.labels["slot"] for s in families["outlive_worker_incarnation"].samples} == {"0", "1"}
    with pytest.raises(TypeError, match='pid must be "own", None or the number'):
        outlive.PrometheusCollector(pid="all")  # type: ignore[arg-type]


def test_our_text_says_what_the_client_library_says(tmp_path):
    """Sample for sample, of jobs whose names have everything in them that has to be escaped."""
    client = pytest.importorskip("prometheus_client")
    parser = pytest.importorskip("prometheus_client.parser")
    loader = loader_that_ran()
    (own,) = [job for job in viewing.jobs() if job.pid == os.getpid() and job.alive]
    strange = viewing.Job(tmp_path, {"pid": 7, "name": 'a "b"\\c\nd {e=,}', "kind": "pool", "rank": 3})
    looked = [(own, own.snapshot()), (strange, own.snapshot())]

    class FixedCollector(outlive.PrometheusCollector):
        def _look(self) -> families.Looked:
            return looked

    def samples(text: str) -> list[tuple[Any, ...]]:
        parsed = parser.text_string_to_metric_families(text)
        return sorted(
            (f.type, f.documentation, s.name, *sorted(s.labels.items()), s.value) for f in parsed for s in f.samples
        )

    registry = client.CollectorRegistry()
    registry.register(FixedCollector())
    ours = samples(families.exposition(looked))

    assert ours == samples(client.generate_latest(registry).decode())
    assert {dict(sample[3:-1])["name"] for sample in ours} == {"Faulty", 'a "b"\\c\nd {e=,}'}
    assert {sample[0] for sample in ours} == {"counter", "gauge", "histogram"}
    assert families.exposition([]).count("# TYPE ") == 30
    del loader


def test_incidents_are_events_of_spans_and_batches_are_sampled():
    """One span for every so many batches, and for each batch that something happened before."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    loader = outlive.DataLoader(jobs.Faulty(), batch_size=4, num_workers=2, faults="skip")

    batches = list(outlive.traced(loader, every=8, tracer=provider.get_tracer("test")))
    spans = exporter.get_finished_spans()

    assert len(batches) == 16
    assert {0, 8} <= {span.attributes["outlive.batch"] for span in spans}
    assert len(spans) <= 2 + len(loader.incidents)
    events = [event for span in spans for event in span.events]
    assert [event.attributes["outlive.id"] for event in events] == [incident.id for incident in loader.incidents]
    assert {event.attributes["outlive.verdict"] for event in events} == {"exception", "exited"}
    with pytest.raises(ValueError, match="every must be a whole number"):
        next(outlive.traced(loader, every=0))


def test_opentelemetry_collects_from_the_board():
    """Observable instruments: nothing is done between two collections."""
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    loader = loader_that_ran()
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider(metric_readers=[reader])
    outlive.observe(provider.get_meter("test"))

    data = reader.get_metrics_data()
    provider.shutdown()
    found = {
        metric.name: [point.value for point in metric.data.data_points]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }

    assert found["outlive.batches"] == [loader.statistics().delivered] == [16]
    assert found["outlive.quarantined"] == [2]
    assert found["outlive.workers"] == [2]


def test_a_logger_is_given_numbers_while_the_loader_runs():
    """The one callback: a dictionary and a step, as TensorBoard's and W&B's loggers take them."""
    loader = outlive.DataLoader(jobs.Faulty(), batch_size=4, num_workers=2, faults="skip")
    told: list[tuple[dict[str, float], int]] = []

    batches = list(outlive.logged(loader, lambda scalars, step: told.append((scalars, step)), every_s=0))

    assert len(batches) == 16
    assert [step for _, step in told] == [*range(1, 17), 16]
    last = told[-1][0]
    assert all(type(value) is float for value in last.values())
    assert last["outlive/delivered"] == 16
    assert last["outlive/quarantined/exited"] == 1
    assert 0 <= last["outlive/wait_share"] <= 1
    assert last["outlive/fetch_seconds"] > 0
    with pytest.raises(TypeError, match="log must be a callable"):
        next(outlive.logged(loader, None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every_s must be a number"):
        next(outlive.logged(loader, print, every_s=-1))
