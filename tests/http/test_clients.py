"""Real clients against the server: the openai SDK's errors, a browser's EventSource."""

import httpx
import openai
import pytest

from tests.helpers import web


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
