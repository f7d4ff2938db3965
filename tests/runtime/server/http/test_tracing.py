"""Spans of requests, as a collector gets them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from enginewright.runtime.server.http.tracing import exporter_to
from enginewright.runtime.shared.errors import EnginewrightError
from tests.runtime.server.conftest import Server

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[tuple[str, queue.Queue[bytes]]]:
    spans: queue.Queue[bytes] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            spans.put(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    server.shutdown()
    server.server_close()


def test_a_request_s_spans_reach_the_collector(
    make_server: Callable[..., Server], tiny_bundle: Path, collector: tuple[str, queue.Queue[bytes]]
) -> None:
    url, sent = collector
    server = make_server(tiny_bundle, "--otlp", url)
    body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 5, "ignore_eos": True}
    reply = server.ask("POST", "/v1/chat/completions", body, traceparent=f"00-{TRACE}-{SPAN}-01")
    assert reply.status == 200
    assert server.complete("a", stream=True, max_tokens=3, ignore_eos=True).status == 200
    assert server.stop() == 0  # what is left is sent then
    spans, raw = [], b""
    while not sent.empty():
        raw += (data := sent.get())
        request = ExportTraceServiceRequest.FromString(data)
        spans += [one for r in request.resource_spans for scope in r.scope_spans for one in scope.spans]
    assert b"secret" not in raw
    chat = next(one for one in spans if one.name == "chat tiny-llama")
    assert chat.trace_id.hex() == TRACE and chat.parent_span_id.hex() == SPAN
    about = {one.key: one.value for one in chat.attributes}
    assert about["gen_ai.usage.output_tokens"].int_value == 5
    assert about["gen_ai.response.id"].string_value == reply.json["id"]
    assert about["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "length"
    parts = [one for one in spans if one.parent_span_id == chat.span_id]
    assert [one.name for one in parts] == ["queue", "prefill", "decode"]
    assert parts[0].start_time_unix_nano == chat.start_time_unix_nano
    assert parts[-1].end_time_unix_nano <= chat.end_time_unix_nano
    other = next(one for one in spans if one.name == "text_completion tiny-llama")
    assert other.trace_id != chat.trace_id and not other.parent_span_id


def test_a_collector_that_is_not_there_stops_nothing(make_server: Callable[..., Server], tiny_bundle: Path) -> None:
    server = make_server(tiny_bundle, "--otlp", "http://127.0.0.1:1/v1/traces")
    assert server.complete("a", max_tokens=2).status == 200


def test_what_is_no_address_is_said() -> None:
    with pytest.raises(EnginewrightError, match="otlp: nowhere isn't an address"):
        exporter_to("nowhere")
