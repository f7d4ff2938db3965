"""OpenTelemetry spans of requests, by its conventions for generative models; they contain no prompts or answers.

A request is a span, with child spans for its waiting, its prompt and its answer. It belongs to the trace in the
client's ``traceparent`` (https://www.w3.org/TR/trace-context/). Names of attributes:
https://opentelemetry.io/docs/specs/semconv/gen-ai/. A thread of the library sends the spans by OTLP over HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import metadata
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...shared.errors import EnginewrightError, MissingDependencyError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from ...requests.outputs import RequestMetrics

_PARTS = ("queue", "prefill", "decode")


class Tracing:
    """Makes a span of each request that ends.

    Args:
        exporter: takes the spans, such as ``exporter_to(URL)``.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        about = {"service.name": "enginewright", "service.version": metadata.version("enginewright")}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("enginewright.server")

    def request(
        self,
        model: str,
        operation: str,
        parent: str | None,
        metrics: RequestMetrics | None,
        problem: str = "",
        attributes: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Makes the spans of a request that has just ended.

        Args:
            model: the model's name.
            operation: "chat", "text_completion", "embeddings", ...
            parent: the client's ``traceparent``; an invalid one begins a new trace.
            metrics: the request's times; None if it failed with ``problem`` before they were known.
            problem: the kind of error; empty for none.
            attributes: further attributes.
        """
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = time.time_ns()
        seconds = (0.0, 0.0, 0.0) if metrics is None else metrics.times
        begin = end - int(sum(seconds) * 1e9)
        span_attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "enginewright",
            "gen_ai.request.model": model,
            **attributes,
        }
        if metrics is not None:
            span_attributes["enginewright.cached_tokens"] = metrics.cached_tokens
        context = TraceContextTextMapPropagator().extract({} if parent is None else {"traceparent": parent})
        kind = trace.SpanKind.SERVER
        span = self._tracer.start_span(f"{operation} {model}", context, kind, span_attributes, start_time=begin)
        below = trace.set_span_in_context(span)
        for name, one in zip(_PARTS, seconds, strict=True):
            part = self._tracer.start_span(name, below, start_time=begin)
            begin += int(one * 1e9)
            part.end(begin)
        if problem:
            span.set_status(trace.StatusCode.ERROR, problem)
        span.end(end)

    def close(self) -> None:
        """Sends the remaining spans, for a few seconds at most."""
        self._provider.shutdown()


def exporter_to(url: str) -> SpanExporter:
    """Returns an exporter that sends spans to a collector, such as "http://127.0.0.1:4318/v1/traces".

    Raises MissingDependencyError without the extra ``otel``, and EnginewrightError for an invalid address.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as e:
        hint = "Install it with: pip install 'enginewright[serve,otel]'"
        raise MissingDependencyError(f"otlp: spans need {e.name}, which is not installed", hint=hint) from e
    if not url.startswith(("http://", "https://")):
        raise EnginewrightError(f"otlp: {url} isn't an address", hint="Pass http://127.0.0.1:4318/v1/traces.")
    return OTLPSpanExporter(endpoint=url, timeout=5)
