"""The OpenAPI document, checked against the application, and a running server, checked against the document."""

import json
import math
import os
from collections import Counter

import httpx
import jsonschema
import pytest
import schemathesis
import schemathesis.engine
from hypothesis import strategies as st
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis.engine import events

from service.http.app import OPERATIONS
from service.http.openapi import build_document
from service.server import build_server
from service.settings import Settings
from tests.helpers import VOCABULARY, lasting, save_random, web

REQUESTS = [operation.request for operation in OPERATIONS if operation.request is not None]
LIMITS = {"max_tokens": 16, "max_prompts": 8, "max_score_texts": 50, "max_prompt_characters": 500}
LIMITS |= {"max_regex_characters": 100}


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
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    OpenAPIV31SpecValidator(document).validate()
    endpoints = build_server(Settings(checkpoint=checkpoint.path)).http.endpoints
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
    tokenizer = save_random(tmp_path / "c", characters).tokenizer
    options = {"checkpoint": tmp_path / "c", "max_tokens": 3, "max_prompts": 4, "model_name": "other"}
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

LETTERS = "".join(c for c in VOCABULARY if c.isalpha())


def sample(name, schema, number=0):
    """A valid value, which varies with `number`."""
    match schema:
        case {"type": "integer" | "number"}:
            return number % len(VOCABULARY)
        case {"type": "string"}:
            return LETTERS[number % len(LETTERS)] * schema.get("minLength", 1)
        case {"type": "array", "prefixItems": parts}:
            return [number % len(VOCABULARY), 0] if name == "logit_bias" else [sample(name, part) for part in parts]
        case {"type": "array"}:
            return [sample(name, schema["items"], number)]
        case {"anyOf": branches}:
            return sample(name, branches[0], number)
    raise AssertionError(schema)


def text_of(name, length):
    if name not in ("regex", "stop_regex") or length < 3:
        return "a" * length
    return "a" * (2 - length % 2) + "|a" * ((length - 1) // 2)  # matches one or two characters, for any max_tokens


def edges(name, schema):
    """(keyword, value at the bound, value beyond it) for each bound of the schema, at any depth."""
    for branch in schema.get("anyOf", ()):
        yield from edges(name, branch)
    step = 1 if schema.get("type") == "integer" else 1e-6
    for bound, sign in ("minimum", -1), ("maximum", 1):
        if bound in schema:
            yield bound, schema[bound], schema[bound] + sign * step
    if "exclusiveMinimum" in schema:
        least = schema["exclusiveMinimum"]
        yield "exclusiveMinimum", math.nextafter(least, math.inf), least
    for bound, sign in ("minLength", -1), ("maxLength", 1):
        if bound in schema:
            yield bound, text_of(name, schema[bound]), text_of(name, schema[bound] + sign)
    for bound, sign in ("minItems", -1), ("maxItems", 1):
        if bound in schema:
            items = schema.get("items") or {"anyOf": schema["prefixItems"]}
            if "prefixItems" in schema:
                yield bound, ["a", 0], ["a", 0][: 2 + sign] + [0] * sign
            else:
                at = [sample(name, items, i) for i in range(schema[bound])]
                yield bound, at, [*at, at[0]] if sign > 0 else at[:-1]
    if "maxProperties" in schema:
        at = {c: 0 for c in VOCABULARY[: schema["maxProperties"]]}
        yield "maxProperties", at, at | {"0": 0}
    if "items" in schema:
        first = [] if name == "logit_bias" else [sample(name, schema["items"], 1)]
        for what, at, beyond in edges(name, schema["items"]):
            yield what, [*first, at], [*first, beyond]
    for i, part in enumerate(schema.get("prefixItems", ())):
        for what, at, beyond in edges(name, part):
            yield what, ["a", 0][:i] + [at] + ["a", 0][i + 1 :], ["a", 0][:i] + [beyond] + ["a", 0][i + 1 :]
    if isinstance(schema.get("additionalProperties"), dict):
        for what, at, beyond in edges(name, schema["additionalProperties"]):
            yield what, {"a": at}, {"a": beyond}


def other_fields(path, name, value):
    """Other fields that a request needs to be valid with this value."""
    if path in ("/generate", "/v1/completions"):
        several = len(value) if name == "seed" and isinstance(value, list) else 1
        ranked = {"n": max(1, min(value, LIMITS["max_prompts"]))} if name == "best_of" else {}  # streams: n = best_of
        ranked |= {"logprobs": 0} if name == "logprob_token_ids" else {}
        return ranked | {
            "prompt": "a" if several == 1 else ["a"] * max(1, min(several, LIMITS["max_prompts"])),
            "max_tokens": LIMITS["max_tokens"] if name in ("min_tokens", "choice") else 1,
        }
    if path == "/v1/score":
        return {} if name in ("texts", "continuations") else {"texts": "ab"}
    return {"/detokenize": {"tokens": [1]}, "/v1/attention": {"text": "a"}}.get(path, {"prompt": "a"})


BOUNDED = "/generate /v1/completions /v1/score /v1/next /tokenize /detokenize /v1/attention query"


@pytest.mark.parametrize("path", BOUNDED.split())
def test_every_documented_bound_is_enforced_exactly(server, document, path):
    if path == "query":
        parameters = document["paths"]["/generate"]["get"]["parameters"]
        fields = {p["name"]: p["schema"] for p in parameters if p.get("in") == "query"}
    else:
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        fields = document["components"]["schemas"][reference.split("/")[-1]]["properties"]

    with httpx.Client(base_url=server.url, timeout=30) as client:

        def ask(name, value):
            if path == "query":
                return client.get("/generate", params=other_fields("/generate", name, value) | {name: value})
            return client.post(path, json=other_fields(path, name, value) | {name: value})

        count = 0
        for name, schema in fields.items():
            for what, at, beyond in edges(name, schema):
                count += 1
                response = ask(name, at)
                # 404: no model has a name of that length; 504: the minimum timeout expires at once
                assert response.status_code in {"model": (404,), "timeout_seconds": (200, 504)}.get(name, (200,)), (
                    name, what, at, response.text,
                )  # fmt: skip
                response = ask(name, beyond)
                assert response.status_code == 400, (name, what, beyond, response.text[:200])
                assert response.json()["error"]["param"].split(".")[0] == name, (what, response.text)
    assert count >= 7


# -- schemathesis --

CASES = int(os.environ.get("CHARGPT_OPENAPI_CASES", 8))  # per route, besides cases at bounds
schemathesis.openapi.format("vocabulary", st.text(st.sampled_from(VOCABULARY), max_size=20))
# Tested by the examples and at their bounds alone: fields that exclude others, or whose values depend on the model.
APART = """
    allowed_characters allowed_token_ids bad_words best_of choice continuations logit_bias logprob_token_ids min_tokens
    model n prefix prompt_logprobs regex replacement_character seed stop_regex stop_token_ids suffix timeout_seconds
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


def test_schemathesis_finds_no_undocumented_response(server, document):
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
    assert answered.total() >= 1500
    labels = {f"{method.upper()} {path}" for method, path, _ in operations(document)}
    assert {label for label, status in answered if status == 200} == labels


# -- /docs --


def test_assets_are_cached_and_the_page_is_not(server):
    for path in ("/docs", "/openapi.json"):
        assert web.get(server.url + path).headers["cache-control"] == "no-cache"
    asset = web.get(f"{server.url}/docs/assets/swagger-ui-bundle.js")
    assert "immutable" in asset.headers["cache-control"]
    again = web.get(f"{server.url}/docs/assets/swagger-ui-bundle.js", headers={"If-None-Match": asset.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for path in ("/redoc", "/docs/assets/nothing", "/docs/assets/%2e%2e/main.py"):
        response = web.get(server.url + path)
        assert (response.status_code, response.json()["error"]["param"]) == (404, None)


def test_docs_page_works_in_a_browser_without_external_requests(server, document, browser):
    asked, console_errors = [], []
    page = browser.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: console_errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: console_errors.append(str(error)))
    page.goto(f"{server.url}/docs")
    page.wait_for_selector(".opblock")
    assert page.locator(".opblock").count() == len(list(operations(document)))
    for method, path, _ in operations(document):
        assert page.locator(f".opblock-{method} [data-path='{path}']").count() == 1
    block = page.locator("#operations-text-generate")
    block.locator(".opblock-summary-control").click()
    block.locator(".execute").click()
    block.locator(".live-responses-table .response-col_status").first.wait_for()
    assert "200" in block.locator(".live-responses-table .response .response-col_status").first.inner_text()
    page.close()
    assert console_errors == []
    assert f"{server.url}/generate" in asked
    assert all(url.startswith((f"{server.url}/", "data:")) for url in asked), asked
