"""Real clients against the server: the openai SDK's errors, a browser's EventSource, a page of another origin."""

import functools
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import httpx
import openai
import pytest

from tests.helpers import wait_until, web


@pytest.mark.parametrize(
    ("options", "kind", "param", "code"),
    [
        ({"prompt": "Caf\u00e9"}, openai.BadRequestError, "prompt", "unknown_character"),
        ({"prompt": "A", "n": 0}, openai.BadRequestError, "n", None),
        ({"prompt": "A", "model": "gpt-4", "stream": True}, openai.NotFoundError, "model", "model_not_found"),
    ],
    ids=str,
)
def test_sdk_raises_typed_errors(bundled, options, kind, param, code):
    with openai.OpenAI(base_url=f"{bundled.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(kind) as raised:
            client.completions.create(**({"model": "chargpt"} | options))
    error = raised.value
    assert (error.type, error.param, error.code) == ("invalid_request_error", param, code)
    assert param in error.body["message"] and error.request_id


# Does not close at the end, like a careless page: the browser then reconnects.
EVENT_SOURCE = """
(url) => new Promise((resolve) => {
    const seen = {text: "", finish_reason: null, end: null, errors: 0};
    const source = new EventSource(url);
    source.onmessage = (event) => {
        if (event.data === "[DONE]") {
            seen.end = event.lastEventId;
            return;
        }
        const piece = JSON.parse(event.data);
        seen.text += piece.text ?? "";
        seen.finish_reason = piece.finish_reason ?? seen.finish_reason;
    };
    source.onerror = () => {
        seen.errors += 1;
        if (source.readyState === EventSource.CLOSED) resolve(seen);
    };
})
"""


def event_source(browser, server, query):
    """What a same-origin page sees, and (status, Last-Event-ID) of each exchange."""
    with browser.new_context(bypass_csp=True) as context:
        page = context.new_page()
        page.goto(f"{server.url}/livez")
        responses = []
        page.on("response", lambda response: responses.append(response))
        seen = page.evaluate(EVENT_SOURCE, f"/generate?{query}")
        return seen, [(response.status, response.request.header_value("last-event-id")) for response in responses]


def test_event_source_receives_the_text_once(browser, bundled):
    prompt = "ROMEO:\nWhat & why?"
    body = {"prompt": prompt, "max_tokens": 40, "seed": 1, "temperature": 0.8}
    expected = web.post(f"{bundled.url}/generate", json=body).json()["choices"][0]
    seen, exchanges = event_source(browser, bundled, str(httpx.QueryParams(body)))
    assert (seen["text"], seen["finish_reason"]) == (expected["text"], "length")
    assert seen["end"] == "done"
    assert exchanges == [(200, None), (204, "done")]
    assert seen["errors"] == 2  # end of stream, then 204


def test_event_source_does_not_retry_an_invalid_request(browser, bundled):
    seen, exchanges = event_source(browser, bundled, "prompt=ROMEO&max_tokens=many")
    assert exchanges == [(400, None)]
    assert (seen["text"], seen["errors"]) == ("", 1)


def test_a_page_of_another_origin_has_no_post_run(bundled, browser, tmp_path):
    """A browser asks before it sends application/json, and the types that it sends unasked are refused."""
    (tmp_path / "index.html").write_text("<title>another origin</title>")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    ask = """async ([url, type, mode]) => {
        const body = new Blob([JSON.stringify({prompt: "a", max_tokens: 5})], type === null ? {} : {type});
        try { return (await fetch(url, {method: "POST", mode, body})).type; } catch (error) { return error.name; }
    }"""
    simple = (None, "text/plain", "application/x-www-form-urlencoded")

    def answered(method, status):
        return bundled.metric("chargpt_http_requests_total", handler="/generate", method=method, status=status)

    before = answered("POST", "415"), answered("POST", "200"), answered("GET", "200")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{other.server_port}/")
        url = f"{bundled.url}/generate"
        assert page.evaluate(ask, [url, "application/json", "cors"]) == "TypeError"
        assert [page.evaluate(ask, [url, kind, "cors"]) for kind in simple] == ["TypeError"] * 3
        assert [page.evaluate(ask, [url, kind, "no-cors"]) for kind in simple] == ["opaque"] * 3  # sent, not read
        image = "url => new Promise(done => { const it = new Image(); it.onerror = () => done(0); it.src = url; })"
        page.evaluate(image, f"{url}?prompt=a&max_tokens=1")
        page.close()
        other.shutdown()
        wait_until(lambda: answered("POST", "415") == before[0] + 6)
        assert answered("POST", "200") == before[1]
        # Documented: the address of an image needs no permission.
        wait_until(lambda: answered("GET", "200") == before[2] + 1)
