"""The spans that the service sends, received over OTLP."""

import collections
import concurrent.futures
import contextlib
import http.server
import itertools
import json
import os
import socket
import textwrap
import threading
import time

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from service import installing
from tests.helpers import ENDLESS, lasting, refusal, serving, timed_out_stream, wait_until, web

MARKER = "SecretMarker"
CLOCKS_APART = 60 * 10**9  # ns; tolerance for the service's conversion from monotonic time


class Collector:
    """An OTLP/HTTP collector that keeps all spans."""

    def __init__(self):
        self.spans = []  # (resource attributes, span)
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
                body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                for part in body.resource_spans:
                    resource = attributes(part.resource)
                    collector.spans += [(resource, span) for scope in part.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever).start()

    def requests(self):
        """Request id -> (resource attributes, request span, phase spans)."""
        found = {}
        phases = collections.defaultdict(list)
        for resource, span in list(self.spans):
            if span.kind == Span.SPAN_KIND_SERVER:
                id = attributes(span)["gen_ai.request.id"]
                assert id not in found, "several spans for one request"
                found[id] = (resource, span)
            else:
                phases[span.trace_id, span.parent_span_id].append(span)
        return {id: (*found[id], phases[found[id][1].trace_id, found[id][1].span_id]) for id in found}

    def request(self, id):
        """Waits for a request's span, which is sent after the response."""
        return wait_until(lambda: self.requests().get(id), otherwise=lambda: f"{id} not in {self.requests().keys()}")

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def attributes(owner):
    def value(v):
        kind = v.WhichOneof("value")
        return [value(each) for each in v.array_value.values] if kind == "array_value" else getattr(v, kind)

    return {pair.key: value(pair.value) for pair in owner.attributes}


@pytest.fixture(scope="module")
def collector():
    with contextlib.closing(Collector()) as collector:
        yield collector


@pytest.fixture(scope="module")
def server(checkpoint, collector):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms
        options = {"http_processes": 2, "max_queued_requests": 50}
        yield from lasting(checkpoint.path, otlp_traces_endpoint=collector.url, **options)


def ask(server, path, body, **headers):
    before = time.time_ns()
    response = web.post(server.url + path, json=body, headers=headers)
    return response, before, time.time_ns()


def test_generation_span_contains_its_phases_at_their_times(server, collector):
    body = {"prompt": "abcde", "max_tokens": 300, "temperature": 0.5, "top_p": 0.9, "seed": 1}
    response, before, after = ask(server, "/generate", body)
    resource, span, phases = collector.request(response.headers["x-request-id"])
    assert resource["service.name"] == "chargpt"
    assert span.name == "text_completion chargpt"
    assert (span.parent_span_id, span.status.code) == (b"", Status.STATUS_CODE_UNSET)
    found = attributes(span)
    timing = response.json()["chargpt"]["timing"]
    latencies = {name.rsplit(".", 1)[1]: found.pop(name) for name in list(found) if ".latency." in name}
    assert found == {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "chargpt",
        "gen_ai.request.model": "chargpt", "gen_ai.request.id": response.headers["x-request-id"],
        "gen_ai.request.max_tokens": 300, "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.input_tokens": 5, "gen_ai.usage.output_tokens": 300, "gen_ai.usage.num_sequences": 1,
        "gen_ai.response.finish_reasons": ["length"], "http.request.method": "POST", "http.route": "/generate",
        "http.response.status_code": 200,
    }  # fmt: skip
    for name, ours in (("queue", "queue"), ("model_prefill", "prefill"), ("model_decode", "decode")):
        assert latencies[f"time_in_{name}"] == pytest.approx(timing[f"{ours}_seconds"], abs=1e-6)
    inference = timing["prefill_seconds"] + timing["decode_seconds"]
    assert latencies["time_in_model_inference"] == pytest.approx(inference, abs=2e-6)
    assert 0 < latencies["time_to_first_token"] <= latencies["e2e"]
    assert latencies["e2e"] == pytest.approx((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, abs=1e-5)

    # In sequence, within the request, which starts while the client waits.
    phases.sort(key=lambda phase: phase.start_time_unix_nano)
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    places = [place for it in phases for place in (it.start_time_unix_nano, it.end_time_unix_nano)]
    places = [span.start_time_unix_nano, *places, span.end_time_unix_nano]
    assert all(b - a >= -10_000 for a, b in itertools.pairwise(places))
    assert places[3] - places[2] < 10_000 > places[5] - places[4]
    assert before - CLOCKS_APART <= places[0] <= after + CLOCKS_APART
    for phase in phases[1:]:
        seconds = (phase.end_time_unix_nano - phase.start_time_unix_nano) / 1e9
        assert seconds == pytest.approx(timing[f"{phase.name}_seconds"], abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "reasons", "tokens", "phases"),
    [
        ("/v1/completions", {"prompt": ["a", "bc"], "n": 2}, ["length"] * 4, (3, 64), "qpd"),
        ("/generate", {"prompt": "a", "choice": ["bcd"]}, ["stop"], (1, 3), "qpd"),
        ("/generate", {"prompt": "a", "max_tokens": 4, "stream": True}, ["length"], (1, 4), "qpd"),
        ("/generate", {"suffix": "b", "max_tokens": 4, "best_of": 2}, ["length"] * 2, (0, 8), "qpdqp"),  # then scores
        ("/v1/score", {"texts": ["abc", "de"]}, ["length"] * 2, (5, 0), "qp"),
        ("/v1/next", {"prompt": ["a", "bc"]}, ["length"] * 2, (3, 2), "qpd"),
    ],
)
def test_every_kind_of_request_has_a_span(server, collector, path, body, reasons, tokens, phases):
    response, _, _ = ask(server, path, body)
    assert response.status_code == 200
    _, span, found = collector.request(response.headers["x-request-id"])
    assert span.name == {"/v1/score": "score", "/v1/next": "next"}.get(path, "text_completion") + " chargpt"
    about = attributes(span)
    assert about["http.route"] == path
    assert about["gen_ai.response.finish_reasons"] == reasons
    assert (about["gen_ai.usage.input_tokens"], about["gen_ai.usage.output_tokens"]) == tokens
    assert sorted(phase.name[0] for phase in found) == sorted(phases)


def test_requests_without_inference_have_no_span(server, collector):
    for path in ("/info", "/v1/models", "/metrics", "/nothing"):
        web.get(server.url + path, headers={"X-Request-Id": f"no{path.replace('/', '-')}"})
    ask(server, "/tokenize", {"prompt": "a"}, **{"X-Request-Id": "no-tokenize"})
    response, _, _ = ask(server, "/generate", {"prompt": "a", "max_tokens": 1})
    collector.request(response.headers["x-request-id"])
    assert not [id for id in collector.requests() if id.startswith("no-")]


def test_span_continues_the_clients_trace(server, collector):
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    sampled = {"traceparent": f"00-{trace}-{parent}-01", "tracestate": "some=thing"}
    response, _, _ = ask(server, "/generate", {"prompt": "a", "max_tokens": 1}, **sampled)
    _, span, phases = collector.request(response.headers["x-request-id"])
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (trace, parent, "some=thing")
    assert {phase.trace_id.hex() for phase in phases} == {trace}

    # traceparent with sampling off yields no span; an invalid one starts a new trace.
    not_sampled = {"traceparent": f"00-{trace}-{parent}-00"}
    unsampled, _, _ = ask(server, "/generate", {"prompt": "a", "max_tokens": 1}, **not_sampled)
    response, _, _ = ask(server, "/generate", {"prompt": "a", "max_tokens": 1}, traceparent=MARKER)
    _, span, _ = collector.request(response.headers["x-request-id"])
    assert span.trace_id.hex() != trace and span.parent_span_id == b""
    processes = set()
    while len(processes) < 2:  # until each has exported a later span
        response, _, _ = ask(server, "/generate", {"prompt": "a", "max_tokens": 1}, Connection="close")
        processes.add(collector.request(response.headers["x-request-id"])[0]["service.instance.id"])
    assert unsampled.headers["x-request-id"] not in collector.requests()


def test_an_invalid_trace_state_is_not_logged(server, collector):
    """OpenTelemetry's own logger quoted up to 4 KB of it."""
    headers = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": f"{MARKER}?" * 300}
    response, _, _ = ask(server, "/generate", {"prompt": "a", "max_tokens": 1}, **headers)
    _, span, _ = collector.request(response.headers["x-request-id"])
    assert (span.trace_id.hex(), span.trace_state) == ("1" * 32, "")
    wait_until(lambda: '"logger":"opentelemetry.' in server.output(), otherwise=server.output)
    assert MARKER not in server.output()


def test_disconnect_is_a_finish_reason_and_not_an_error(server, collector):
    body = {"prompt": "a", "max_tokens": ENDLESS, "stream": True}
    with web.stream("POST", f"{server.url}/generate", json=body) as response:
        next(response.iter_lines())
    _, span, phases = collector.request(response.headers["x-request-id"])
    about = attributes(span)
    assert about["gen_ai.response.finish_reasons"] == ["abort"]
    assert 0 < about["gen_ai.usage.output_tokens"] < ENDLESS
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert sorted(phase.name for phase in phases) == ["decode", "prefill", "queue"]


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({"prompt": "a", "max_tokens": ENDLESS, "timeout_seconds": 0.1}, 504, "timeout"),
        ({"prompt": "a", "max_tokens": ENDLESS, "stream": True}, 200, "timeout"),
        ({"prompt": "a", "temperature": -1}, 400, None),
        ({"prompt": "a", "n": 128}, 429, None),
    ],
)
def test_failures_are_marked_as_errors_and_rejections_are_not(server, collector, body, status, error):
    response = timed_out_stream(server, "/generate", body) if "stream" in body else ask(server, "/generate", body)[0]
    assert response.status_code == status
    _, span, _ = collector.request(response.headers["x-request-id"])
    about = attributes(span)
    assert about["http.response.status_code"] == status
    assert about.get("error.type") == error
    assert span.status.code == (Status.STATUS_CODE_UNSET if error is None else Status.STATUS_CODE_ERROR)


def test_spans_contain_no_request_text(server, collector):
    body = {"prompt": MARKER, "stop": [MARKER + "s"], MARKER: MARKER}
    good, _, _ = ask(server, "/generate", body, Authorization=MARKER)
    bad, _, _ = ask(server, "/generate", body | {"model": MARKER}, Cookie=MARKER)
    query, _, _ = ask(server, f"/generate?{MARKER}={MARKER}", body)
    assert (good.status_code, bad.status_code, query.status_code) == (200, 404, 200), good.text
    for response in (good, bad, query):
        resource, span, phases = collector.request(response.headers["x-request-id"])
        assert MARKER.encode() not in b"".join(each.SerializeToString() for each in (span, *phases))
        assert MARKER not in json.dumps(resource)


def test_variables_of_opentelemetry_apply_and_pending_spans_are_exported_at_shutdown(checkpoint, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with (
        contextlib.closing(Collector()) as collector,
        serving(checkpoint.path, otlp_traces_endpoint=collector.url) as server,
    ):
        ask(server, "/generate", {"prompt": "a", "max_tokens": 1})
        parent = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
        response, _, _ = ask(server, "/generate", {"prompt": "a", "max_tokens": 1}, **parent)
        assert not collector.spans
        assert server.stop() == 0
        ((id, (resource, *_)),) = collector.requests().items()
        assert (id, resource["service.name"]) == (response.headers["x-request-id"], "mine")


def test_a_variable_that_opentelemetry_cannot_use_ends_the_start_with_one_sentence(monkeypatch):
    """With some, the HTTP process died again and again; with others, there were 36 lines of traceback."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:  # of this file's server
        monkeypatch.delenv(name)
    for variables, reason in (
        ({"OTEL_PROPAGATORS": "b3"}, "Propagator b3 not found. It is either misspelled or not installed."),
        (
            {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "9", "OTEL_BSP_MAX_QUEUE_SIZE": "8"},
            "max_export_batch_size must be less than or equal to max_queue_size.",
        ),
        (
            {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "-1"},
            "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be a non-negative integer but got -1",
        ),
        ({"OTEL_TRACES_SAMPLER": "sometimes"}, "Couldn't recognize sampler sometimes."),  # and used another one
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            given = ", ".join(f"{name}={value}" for name, value in variables.items())
            problem = refusal("--otlp-traces-endpoint=http://localhost:4318/v1/traces")
        assert problem.splitlines()[1:] == [f"  OpenTelemetry does not accept {given}: {reason}"]
    monkeypatch.setenv("OTEL_PROPAGATORS", "b3")
    assert "OTEL_PROPAGATORS=b3: Propagator b3 not found" in refusal()  # FastAPI reads it without traces too
    monkeypatch.delenv("OTEL_PROPAGATORS")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization={MARKER},{MARKER}")  # the latter has no name
    problem = refusal("--otlp-traces-endpoint=http://localhost:4318/v1/traces")
    assert "does not accept OTEL_EXPORTER_OTLP_HEADERS: Header format invalid!" in problem and MARKER not in problem


@pytest.mark.parametrize("is_silent", [False, True])
def test_missing_or_silent_collector_delays_nothing(checkpoint, monkeypatch, is_silent):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if is_silent:
            listener.listen()  # connections are accepted and never answered
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"
        with serving(checkpoint.path, otlp_traces_endpoint=url) as server:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                body = {"prompt": "a", "max_tokens": 2}
                answers = pool.map(lambda _: ask(server, "/generate", body)[0].status_code, range(40))
                assert set(answers) == {200}
            assert server.stop() == 0
            for line in map(json.loads, server.output().splitlines()):
                assert line["message"]


def test_without_the_extra_the_service_runs_and_rejects_the_setting(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(  # as if it was not installed
        textwrap.dedent("""
            import sys
            class Missing:
                def find_spec(self, name, path=None, target=None):
                    if name in ("opentelemetry.sdk", "opentelemetry.exporter"):
                        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            sys.meta_path.insert(0, Missing())
        """)
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")
    with serving(checkpoint.path) as server:
        assert ask(server, "/generate", {"prompt": "a", "max_tokens": 1})[0].status_code == 200
    problem = refusal("--otlp-traces-endpoint=http://localhost:4318/v1/traces")
    assert "--otlp-traces-endpoint (CHARGPT_OTLP_TRACES_ENDPOINT): needs the extra tracing" in problem
    assert installing("tracing") in problem
