"""The OpenAPI document, checked against the application, and a running server, checked against the document."""

import json
import os
from collections import Counter

import pytest
from hypothesis import strategies as st

from service.http.app import OPERATIONS
from service.http.routes.openapi import build_document
from service.server import build_server
from service.settings import Settings
from tests.helpers import VOCABULARY, lasting, save_random, web

REQUESTS = [operation.request for operation in OPERATIONS if operation.request is not None]
LIMITS = {"max_tokens": 16, "max_prompt_characters": 500}


@pytest.fixture(scope="module")
def server(checkpoint):
    yield from lasting(checkpoint.path, **LIMITS)


@pytest.fixture(scope="module")
def document(server):
    return web.get(f"{server.url}/openapi.json").raise_for_status().json()


def operations(document):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


# -- content --


def test_document_is_openapi_3_1_and_lists_exactly_the_routes(checkpoint, document, tmp_path, monkeypatch):
    from openapi_spec_validator import OpenAPIV31SpecValidator

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    OpenAPIV31SpecValidator(document).validate()
    routes = build_server(Settings(checkpoint=checkpoint.path)).http.router.routes
    endpoints = {route.path.replace(":path", ""): route.endpoint for route in routes}
    own = {"/openapi.json", "/docs", "/"}
    assert own <= endpoints.keys()
    own |= {path for path in endpoints if path.startswith(("/page/", "/docs/assets/"))}
    expected = {
        (path, method.lower())
        for path in endpoints.keys() - own
        for method in endpoints[path].operations.keys() - {"HEAD"}
    }
    assert {(path, method) for method, path, _ in operations(document)} == expected


def test_every_request_field_has_a_description_and_an_example(document):
    requests = {request.__name__ for request in REQUESTS}
    bodies = [o["requestBody"]["content"]["application/json"] for *_, o in operations(document) if "requestBody" in o]
    assert {body["schema"]["$ref"].split("/")[-1] for body in bodies} == requests
    for name in requests | {"StreamOptions"}:
        for field, schema in document["components"]["schemas"][name]["properties"].items():
            assert schema["description"] and schema["examples"], (name, field)
    for *_, operation in operations(document):
        assert operation["summary"]
        for parameter in operation["parameters"]:
            assert "$ref" in parameter or parameter["description"]


def every_example(node):
    """(schema, example) pairs."""
    match node:
        case {"schema": schema, "examples": dict(examples)} if "x-itemSchema" not in node:
            yield from ((schema, example["value"]) for example in examples.values())
        case {"examples": list(examples)}:
            yield from ((node, example) for example in examples)
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from every_example(part)


@pytest.mark.parametrize("characters", [VOCABULARY, "CNO()=123", [chr(0x4E00 + i) for i in range(5000)]])
def test_examples_match_their_schemas_and_the_vocabulary(tmp_path, characters):
    import jsonschema
    from openapi_spec_validator import OpenAPIV31SpecValidator

    tokenizer = save_random(tmp_path / "c", characters).tokenizer
    options = {"checkpoint": tmp_path / "c", "max_tokens": 3, "model_name": "other"}
    document = build_document(Settings(**options), tokenizer, OPERATIONS)
    OpenAPIV31SpecValidator(document).validate()
    assert len(json.dumps(document)) < 120_000
    examples = list(every_example(document))
    assert len(examples) > 100
    prompts = document["components"]["schemas"]["GenerateRequest"]["properties"]["prompt"]["examples"]
    assert prompts == [next(filter(str.isalpha, characters))]  # no other model's
    for schema, example in examples:
        jsonschema.Draft202012Validator(schema | {"components": document["components"]}).validate(example)
    for *_, operation in operations(document):
        for body in operation.get("requestBody", {}).get("content", {}).values():
            for example in body["examples"].values():
                texts = [example["value"].get(name, "") for name in ("prompt", "suffix", "prefix", "texts", "choice")]
                assert set("".join("".join(text) for text in texts)) <= set(characters)


def test_every_request_example_succeeds(server, document):
    for method, path, operation in operations(document):
        body = operation.get("requestBody", {"content": {"application/json": {"examples": {}}}})
        for example in body["content"]["application/json"]["examples"].values():
            response = web.request(method, server.url + path, json=example["value"])
            assert response.status_code == 200, (path, example, response.text)


def test_security_follows_the_settings(checkpoint, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("some-key-0123")

    def security(**options):
        document = build_document(Settings(**options), checkpoint.tokenizer, OPERATIONS)
        return {path: operation["security"] for _, path, operation in operations(document)}

    assert security()["/info"] == [{}, {"key": []}]
    assert security(api_keys_file=keys)["/info"] == security(api_keys_file=keys)["/metrics"] == [{"key": []}]
    assert security(api_keys_file=keys, public_metrics=True)["/metrics"] == []
    assert security(api_keys_file=keys)["/livez"] == security()["/readyz"] == security()["/health"] == []


# -- bounds --

V = len(VOCABULARY)
LIMITED = [  # by settings and checkpoint: a field, its bound, a value of a size, and other fields beside it
    ("prompt", 500, lambda n: "a" * n, {}),
    ("prompt", 500, lambda n: [1] * n, {}),
    ("prompt", 128, lambda n: ["a"] * n, {}),
    ("seed", 128, lambda n: [1] * n, {"prompt": ["a"] * 128}),
    ("n", 128, int, {}),
    ("best_of", 128, int, {}),
    ("max_tokens", 16, int, {}),
    ("min_tokens", 16, int, {"max_tokens": 16}),
    ("logprobs", V, int, {}),
    ("regex", 1000, lambda n: f"[{'a' * (n - 2)}]", {}),
    ("stop_regex", 1000, lambda n: f"[{'a' * (n - 2)}]", {}),
    ("prompt", V - 1, lambda n: [n], {}),
    ("stop_token_ids", V - 1, lambda n: [n], {}),
    ("allowed_token_ids", V - 1, lambda n: [n], {}),
    ("logit_bias", V - 1, lambda n: [[n, 0]], {}),
    ("logit_bias", V, lambda n: [[c, 0] for c in [*VOCABULARY, 0][:n]], {}),
    ("logit_bias", V, lambda n: dict.fromkeys([*VOCABULARY, "0"][:n], 0), {}),
    ("tokens", V - 1, lambda n: [n], {}),
    ("texts", 10_000, lambda n: ["a"] * n, {}),
    ("continuations", 10_000, lambda n: ["a"] * n, {}),
    ("text", 8, lambda n: "a" * n, {}),
    ("layer", 1, int, {"text": "a"}),
    ("head", 3, int, {"text": "a"}),
]
ROUTES = {"tokens": "/detokenize", "texts": "/v1/score", "continuations": "/v1/score"}
ROUTES |= dict.fromkeys(("text", "layer", "head"), "/v1/attention")


@pytest.mark.parametrize(("name", "bound", "value", "others"), LIMITED)
def test_bounds_of_settings_and_checkpoint_are_enforced(server, name, bound, value, others):
    """Those of a field itself are pydantic's."""
    path = ROUTES.get(name, "/generate")
    body = ({"prompt": "a", "max_tokens": 1} if path == "/generate" else {}) | others
    at, beyond = (web.post(server.url + path, json=body | {name: value(size)}) for size in (bound, bound + 1))
    assert at.status_code == 200, at.text
    assert (beyond.status_code, beyond.json()["error"]["param"].split(".")[0]) == (400, name), beyond.text


def test_the_document_has_no_bounds_of_the_server(checkpoint):
    limits = {"max_tokens": 3, "max_prompt_characters": 9, "max_held_bytes": 1 << 20}
    one, other = (build_document(Settings(**options), checkpoint.tokenizer, OPERATIONS) for options in ({}, limits))
    assert one == other


# -- schemathesis --

CASES = int(os.environ.get("CHARGPT_OPENAPI_CASES", 8))  # per route, besides cases at bounds
# Tested by the examples and other tests alone: fields that exclude others, or whose values depend on the model.
APART = """
    allowed_characters allowed_token_ids bad_words best_of choice continuations logit_bias min_tokens
    model n prefix regex replacement_character seed stop_regex stop_token_ids suffix timeout_seconds
    unknown_characters
""".split()


def closed(document):
    """A stricter copy for schemathesis: no fields of APART, no additional response fields, a schema for each event.

    schemathesis combines a field's bounds with examples of the others: in requests these become null, the default.
    """
    document = json.loads(json.dumps(document))
    requests = {request.__name__ for request in REQUESTS} | {"StreamOptions"}
    for name, schema in document["components"]["schemas"].items():
        if name not in requests:
            schema["additionalProperties"] = False
            continue
        schema["properties"] = {name: field for name, field in schema["properties"].items() if name not in APART}
        for field in schema["properties"].values():
            if {"type": "null"} in field.get("anyOf", ()):
                field["examples"] = [None]
    for *_, operation in operations(document):
        parameters = operation["parameters"]
        operation["parameters"] = [it for it in parameters if it.get("in") != "query" or it["name"] not in APART]
        for response in operation["responses"].values():
            for media_type in response.get("content", {}).values():
                if "x-itemSchema" in media_type:
                    media_type["schema"] = media_type.pop("x-itemSchema")  # schemathesis applies it to each event
    return document


@pytest.mark.tools
def test_schemathesis_finds_no_undocumented_response(server, document):
    import schemathesis.engine  # which takes a second, and every test process collects this file
    from schemathesis.engine import events

    schemathesis.openapi.format("vocabulary", st.text(st.sampled_from(VOCABULARY), max_size=20))
    config = {
        "base-url": server.url,
        "seed": 1,
        "continue-on-failure": True,
        "generation": {"max-examples": CASES, "deterministic": True, "database": "none"},
        "checks": {
            "positive_data_acceptance": {"enabled": False},  # schemas omit vocabulary and exclusions
            "negative_data_rejection": {"expected-statuses": [400, 401, 404, 405, 414, 415, 429]},  # 414: a long query
        },
        "phases": {"stateful": {"enabled": False}},
    }
    schema = schemathesis.openapi.from_dict(closed(document), config=schemathesis.Config.from_dict(config))
    answered, failures = Counter(), []
    for event in schemathesis.engine.from_schema(schema).execute():
        assert not isinstance(event, events.NonFatalError | events.FatalError), event
        if not isinstance(event, events.ScenarioFinished):
            continue
        for id, node in event.recorder.cases.items():
            status = event.recorder.interactions[id].response.status_code
            answered[node.value.operation.label, status] += 1
        for checks in event.recorder.checks.values():
            failures += [check.failure_info for check in checks if check.failure_info is not None]
    print(f"{answered.total()} cases:", *sorted(answered.items()), sep="\n")
    reports = [f"{info.failure.title}: {info.failure.message}\n{info.code_sample}"[:2000] for info in failures]
    assert not failures, "\n\n".join(reports)
    assert {status for _, status in answered if status >= 500} <= {504}
    assert answered.total() >= 1000
    labels = {f"{method.upper()} {path}" for method, path, _ in operations(document)}
    assert {label for label, status in answered if status == 200} == labels


# -- /docs --


def test_assets_are_cached_and_the_page_is_not(server):
    headers = web.get(f"{server.url}/docs").headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    for path in ("/docs", "/openapi.json"):
        assert web.get(server.url + path).headers["cache-control"] == "no-cache"
    asset = web.get(f"{server.url}/docs/assets/swagger-ui-bundle.js")
    assert "immutable" in asset.headers["cache-control"]
    again = web.get(f"{server.url}/docs/assets/swagger-ui-bundle.js", headers={"If-None-Match": asset.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for path in ("/redoc", "/docs/assets/nothing", "/docs/assets/%2e%2e/main.py"):
        response = web.get(server.url + path)
        assert (response.status_code, response.json()["error"]["param"]) == (404, None)
