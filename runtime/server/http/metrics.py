"""Metrics for Prometheus, under our names and under vLLM's, which dashboards and routers support."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.registry import Collector

from ...engine.pulse import METRICS, Metric
from ...requests.outputs import RequestMetrics
from ...shared.counters import COUNTERS, Counters
from .options import ServerOptions

if TYPE_CHECKING:
    from ..engines.engine_client import Model

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TIMES = {
    "time_to_first_token_seconds": "Time from a request's arrival to its first token.",
    "inter_token_latency_seconds": "Average time per token of an answer, after the first token.",
    "e2e_request_latency_seconds": "Time from a request's arrival to its last token.",
    "request_queue_time_seconds": "Time that a request waits before its prompt is computed.",
    "request_prefill_time_seconds": "Time from the start of the prompt's computation to the first token.",
    "request_decode_time_seconds": "Time from the first token to the last.",
    "request_inference_time_seconds": "Time from the start of the prompt's computation to the last token.",
}
_COUNTS = {
    "prompt_tokens": "Prompt tokens.",
    "generation_tokens": "Generated tokens.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens that were found in the prefix cache.",
    "spec_decode_num_draft_tokens": "Tokens that speculation proposed.",
    "spec_decode_num_accepted_tokens": "Proposed tokens that were accepted.",
}
_PREFIXES = ("enginewright_", "vllm:")
_USAGE = {
    "tenant_requests": "Ended requests of each tenant.",
    "tenant_prompt_tokens": "Prompt tokens of each tenant.",
    "tenant_generation_tokens": "Generated tokens of each tenant.",
}
OTHER_TENANTS = "(other)"
"""The label of the series that counts all tenants without a series of their own."""
_OF_MODELS: tuple[tuple[Metric, Callable[[Model], float]], ...] = (
    (Metric("engine_deaths", "Engines that died or were killed.", counts=True), lambda model: model.deaths),
    (Metric("engine_ready", "1 if the model answers, otherwise 0."), lambda model: float(model.state == "ready")),
    (Metric("replicas", "Engines of the model that answer."), lambda model: model.replicas),
    (
        Metric("requests_retried", "Requests that were sent again to another replica.", counts=True),
        lambda model: model.retried,
    ),
)
"""Metrics of a model that the front end knows itself, with their values.

The engine's metrics are those of ``Pulse``.
"""


class Metrics:
    """Prometheus metrics of the server's requests.

    Args:
        models: the models by their names; gauges read their state.
        options: the server's options. The first ``tenant_metrics`` tenants that end a request get series of their own.
        counters: the counters of the front end's own helpers.
    """

    def __init__(self, models: Mapping[str, Model], options: ServerOptions, counters: Counters | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each other one, which nobody's dashboards look at
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_Now(models, counters or Counters()))
        self._times = {
            name: [
                Histogram(prefix + name, text, ["model_name"], buckets=_SECONDS, registry=self._registry)
                for prefix in _PREFIXES
            ]
            for name, text in _TIMES.items()
        }
        self._counts = {
            name: [Counter(prefix + name, text, ["model_name"], registry=self._registry) for prefix in _PREFIXES]
            for name, text in _COUNTS.items()
        }
        self._ends = [
            Counter(
                f"{prefix}request_success",
                "Ended requests, by the reason for the end.",
                ["model_name", "finished_reason"],
                registry=self._registry,
            )
            for prefix in _PREFIXES
        ]
        self._most_tenants = options.tenant_metrics
        self._tenants: set[str] = set()
        self._usage = {
            name: Counter(f"enginewright_{name}", text, ["tenant", "model_name"], registry=self._registry)
            for name, text in (_USAGE if options.tenant_metrics else {}).items()
        }
        self._responses = Counter(
            "enginewright_http_responses", "Responses, by HTTP status.", ["status"], registry=self._registry
        )

    def ended(self, model: str, prompt: int, new: int, times: RequestMetrics, reason: str, tenant: str = "") -> None:
        """Counts a request that has ended.

        Args:
            model: the model's name.
            prompt, new: numbers of prompt tokens and of generated tokens.
            times: its times and counts.
            reason: how the request ended.
            tenant: the request's tenant.
        """
        waited, read, wrote = times.times
        self._count(model, prompt_tokens=prompt, generation_tokens=new)
        self._count(model, prefix_cache_queries=prompt, prefix_cache_hits=times.cached_tokens)
        self._count(model, spec_decode_num_draft_tokens=times.drafted)
        self._count(model, spec_decode_num_accepted_tokens=times.accepted)
        self._time(model, request_queue_time_seconds=waited, request_prefill_time_seconds=read)
        self._time(model, request_decode_time_seconds=wrote, request_inference_time_seconds=read + wrote)
        self._time(model, time_to_first_token_seconds=waited + read, e2e_request_latency_seconds=waited + read + wrote)
        if new > 1:
            self._time(model, inter_token_latency_seconds=wrote / (new - 1))
        for counter in self._ends:
            counter.labels(model, reason).inc()
        self._use(model, tenant, prompt, new)

    def aborted(self, model: str, prompt: int = 0, new: int = 0, tenant: str = "") -> None:
        """Counts a request that was aborted or whose engine died, with its ``prompt`` tokens and ``new`` tokens so
        far.
        """
        for counter in self._ends:
            counter.labels(model, "abort").inc()
        self._use(model, tenant, prompt, new)

    def _use(self, model: str, tenant: str, prompt: int, new: int) -> None:
        """Counts a tenant's request and its tokens, if tenants are counted."""
        if not self._usage:
            return
        if len(self._tenants) < self._most_tenants:
            self._tenants.add(tenant)
        label = tenant if tenant in self._tenants else OTHER_TENANTS
        for name, count in zip(_USAGE, (1, prompt, new), strict=True):
            self._usage[name].labels(label, model).inc(count)

    def responded(self, status: int) -> None:
        """Counts a response that was begun."""
        self._responses.labels(str(status)).inc()

    def text(self) -> bytes:
        """Returns the page of ``/metrics``."""
        return generate_latest(self._registry)

    def _count(self, model: str, **found: int) -> None:
        for name, value in found.items():
            for counter in self._counts[name]:
                counter.labels(model).inc(value)

    def _time(self, model: str, **found: float) -> None:
        for name, value in found.items():
            for histogram in self._times[name]:
                histogram.labels(model).observe(max(value, 0.0))


def _count(counter: str, model: Model) -> int:
    """Returns the value of a counter of a model's engines; see ``shared.counters``."""
    return model.beat.count(counter)


class _Now(Collector):
    """The state of the models at the time of a scrape."""

    def __init__(self, models: Mapping[str, Model], counters: Counters) -> None:
        self._models, self._counters = models, counters

    def collect(self) -> Iterable[PrometheusMetric]:
        for prefix in _PREFIXES:
            yield from self._of(prefix)

    def _of(self, prefix: str) -> Iterator[PrometheusMetric]:
        for field, metric in METRICS.items():
            yield self._family(prefix, metric, attrgetter(f"beat.{field}"))
        for name, text in COUNTERS.items():
            yield self._family(prefix, Metric(name, text, counts=True), partial(_count, name))
        if prefix == "vllm:":
            config = GaugeMetricFamily(
                "vllm:cache_config_info",
                "Always 1; labels have the KV cache's block size and number of blocks.",
                labels=["model_name", "block_size", "num_gpu_blocks"],
            )
            for model in self._models.values():
                tokens = int(model.info.get("kv_cache_tokens", 0))
                config.add_metric([model.name, "32", str(tokens // 32)], 1)
            yield config
            adapters = GaugeMetricFamily(
                "vllm:lora_requests_info",
                "Always 1; labels list no adapters, because requests can't use any.",
                labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
            )
            adapters.add_metric(["0", "", ""], 1)
            yield adapters
        else:
            for metric, value in _OF_MODELS:
                yield self._family(prefix, metric, value)
            failed = CounterMetricFamily(
                prefix + "helper_errors",
                "Errors in optional parts, such as speculation and the cache on disk; requests continue.",
                labels=["model_name", "helper"],
            )
            for helper, count in self._counters.helper_errors.items():
                failed.add_metric(["", helper], count)
            for model in self._models.values():
                for helper, count in model.beat.helper_errors:
                    failed.add_metric([model.name, helper], count)
            yield failed

    def _family(self, prefix: str, metric: Metric, value: Callable[[Model], float]) -> PrometheusMetric:
        """Returns a metric with the value of each model."""
        kind = CounterMetricFamily if metric.counts else GaugeMetricFamily
        family = kind(prefix + metric.name, metric.text, labels=["model_name"])
        for model in self._models.values():
            family.add_metric([model.name], value(model))
        return family
