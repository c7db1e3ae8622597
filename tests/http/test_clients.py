"""Real clients against the server: the openai SDK, curl, a browser's EventSource, and recorded requests of benchmark
and evaluation tools. Log-probabilities are checked against transformers on the same folder.
"""

import itertools
import json
import math
import subprocess
from operator import itemgetter

import httpx
import openai
import pytest
import torch
from playwright.sync_api import sync_playwright

from service.settings import BUNDLED
from tests.helpers import ENDLESS, RunningServer, web
from tests.toolbox.http import events, pieces, text_of
from tests.toolbox.needs import program

ROUNDING = 2e-4  # nats between fp32 and fp64; values compared for order differ by more

LINES = (
    "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n"
    "Rough winds do shake the darling buds of May,\nAnd summer's lease hath all too short a date;\n"
)


@pytest.fixture(scope="module")
def server():
    with RunningServer(BUNDLED) as server:
        server.wait_until_ready()
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.output()


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer():
    """Loaded from the checkpoint folder, as by the tools."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(BUNDLED)


@pytest.fixture(scope="module")
def next_logits(tokenizer):
    """transformers' logits after each character of a text: (T, V) float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float64)

    @torch.no_grad()
    def logits(text):
        return model(torch.tensor([tokenizer.encode(text)])).logits[0]

    return logits


@pytest.fixture(scope="module")
def rows(tokenizer, next_logits):
    """(log-probability, log-probabilities of all characters, likeliest first) for each character but the first."""
    characters = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))

    def rows(text):
        table = next_logits(text)[:-1].log_softmax(-1).tolist()
        ranked = [dict(sorted(zip(characters, row, strict=True), key=itemgetter(1), reverse=True)) for row in table]
        return [(row[c], row) for c, row in zip(text[1:], ranked, strict=True)]

    return rows


@pytest.fixture(scope="module")
def greedy(tokenizer, next_logits):
    """Greedy decoding, with penalties as OpenAI defines them."""

    def text(prompt, max_tokens, frequency_penalty=0.0, presence_penalty=0.0):
        counts = torch.zeros(len(tokenizer), dtype=torch.float64)
        answer = ""
        for _ in range(max_tokens):
            logits = next_logits(prompt + answer)[-1]
            id = int((logits - frequency_penalty * counts - presence_penalty * (counts > 0)).argmax())
            counts[id] += 1
            answer += tokenizer.decode([id])
        return answer

    return text


def data_lines(response):
    """The JSON of server-sent events; asserts that [DONE] comes last."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data:") for line in lines)
    *events, done = [line.removeprefix("data:").strip() for line in lines]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def near(value):
    return pytest.approx(value, abs=ROUNDING)


# -- GuideLLM 0.8.1, kind=openai_http, request_format=/v1/completions --

GUIDELLM_HEADERS = {"Accept-Encoding": "gzip, deflate, br, zstd", "Authorization": "Bearer secret"}
GUIDELLM_STREAM = {
    "model": "chargpt",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_tokens": 24,
    "ignore_eos": True,
    "prompt": "    m  Finish medical want almost away until. It",
}
GUIDELLM_WHOLE = {"model": "chargpt", "max_tokens": 12, "ignore_eos": True, "prompt": "ROMEO:"}


def test_guidellm_finds_the_server_and_its_model(server):
    with httpx.Client(base_url=server.url, headers=GUIDELLM_HEADERS) as guidellm:
        assert guidellm.get("/health").status_code == 200
        assert [model["id"] for model in guidellm.get("/v1/models").json()["data"]] == ["chargpt"]


def test_guidellm_reads_a_stream(server):
    """GuideLLM joins the texts, keeps the last usage and the first id; a chunk with `error` is a failure."""
    with web.stream("POST", f"{server.url}/v1/completions", json=GUIDELLM_STREAM, headers=GUIDELLM_HEADERS) as answer:
        assert answer.status_code == 200
        chunks = data_lines(answer)
    assert not any("error" in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    text = ""
    for chunk in chunks[:-1]:
        assert chunk["choices"][0]["text"]
        text += chunk["choices"][0]["text"]
        expected = {"prompt_tokens": 48, "completion_tokens": len(text), "total_tokens": 48 + len(text)}
        assert chunk["usage"] == expected
    assert len(text) == 24
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], expected)


def test_guidellm_reads_a_whole_response(server):
    answer = web.post(f"{server.url}/v1/completions", json=GUIDELLM_WHOLE, headers=GUIDELLM_HEADERS)
    answer.raise_for_status()
    body = answer.json()
    assert body["id"]
    assert len(body["choices"][0]["text"]) == 12
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (6, 12)


# -- AIPerf 0.13.0, --endpoint-type completions --

AIPERF_HEADERS = {
    "User-Agent": "aiperf/0.13.0",
    "X-Request-ID": "e51cf8c2-5f98-4ceb-b311-66c0d5c2dc9d",
    "X-Correlation-ID": "b6ad8c27-963c-4c4d-a7fd-5e9b22fcef5e",
    "X-Session-Affinity": "b6ad8c27-963c-4c4d-a7fd-5e9b22fcef5e",
}
AIPERF_PROBE = {"prompt": "Lo", "max_tokens": 1, "model": "chargpt"}
AIPERF_STREAM = {
    "prompt": "-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnop",
    "model": "chargpt",
    "stream": True,
    "max_tokens": 24,
    "stream_options": {"include_usage": True},
}
AIPERF_WHOLE = {
    "prompt": "nopqrstuvwxyz\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUV",
    "model": "chargpt",
    "stream": False,
    "max_tokens": 24,
    "ignore_eos": True,
    "min_tokens": 24,
}
AIPERF_USAGE = {"prompt_tokens": 48, "completion_tokens": 24, "total_tokens": 72}


def test_aiperf_finds_the_model_and_the_metrics(server):
    """AIPerf sends HEAD /metrics first, then GET if the status is not 200."""
    with httpx.Client(base_url=server.url, headers=AIPERF_HEADERS) as aiperf:
        assert aiperf.get("/v1/models").status_code == 200
        assert aiperf.post("/v1/completions", json=AIPERF_PROBE).status_code == 200
        assert aiperf.head("/metrics").status_code in (200, 405)
        metrics = aiperf.get("/metrics")
        assert metrics.status_code == 200
        assert metrics.headers["content-type"].startswith("text/plain")
        assert "chargpt_time_to_first_token_seconds_bucket" in metrics.text


def test_aiperf_reads_a_stream(server):
    """AIPerf times chunks with text, counts by the last usage and skips objects other than text_completion."""
    headers = AIPERF_HEADERS | {"Accept": "text/event-stream"}
    with web.stream("POST", f"{server.url}/v1/completions", json=AIPERF_STREAM, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-request-id"] == AIPERF_HEADERS["X-Request-ID"]
        *chunks, last = data_lines(answer)
    assert {chunk["object"] for chunk in [*chunks, last]} == {"text_completion"}
    assert all(chunk["choices"][0]["text"] for chunk in chunks)
    assert sum(len(chunk["choices"][0]["text"]) for chunk in chunks) == 24
    assert not any(chunk["usage"] for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], AIPERF_USAGE)


def test_aiperf_reads_a_whole_response(server):
    headers = AIPERF_HEADERS | {"Accept": "application/json"}
    answer = web.post(f"{server.url}/v1/completions", json=AIPERF_WHOLE, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["object"] == "text_completion"
    assert len(answer.json()["choices"][0]["text"]) == 24
    assert answer.json()["usage"] == AIPERF_USAGE


# -- lm-evaluation-harness 0.4.13, local-completions --

HARNESS_HEADERS = {"User-Agent": "python-requests/2.34.2", "Authorization": "Bearer"}  # no API key
HARNESS_LOGLIKELIHOOD = {
    "model": "chargpt",
    "temperature": 0,
    "max_tokens": 1,
    "logprobs": 1,
    "seed": 1234,
    "echo": True,
}
HARNESS_GENERATE = {"model": "chargpt", "max_tokens": 20, "temperature": 0, "stop": ["\n\n"], "seed": 1234}


def harness_reads(answer, context_lengths):
    """(loglikelihood, whether greedy) of each continuation; without the last character, which is generated."""
    choices = sorted(answer["choices"], key=itemgetter("index"))
    results = []
    for choice, context_length in zip(choices, context_lengths, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][context_length:-1]
        tops = choice["logprobs"]["top_logprobs"][context_length:-1]
        is_greedy = all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))
        results.append((sum(logprobs), is_greedy))
    return results


@pytest.mark.parametrize("prompt_type", ["ids", "texts"])
def test_harness_loglikelihoods_equal_transformers(server, tokenizer, rows, greedy, prompt_type):
    context = "ROMEO:\nWhat"
    pairs = [
        (context, greedy(context, 8)),
        (context, " is the matter"),
        ("KING RICHARD", " II:\nNow"),
        ("KING RICHARD", " xkq"),
        ("\n", LINES),  # rolling; the prefix is custom_prefix_token_id=0
        (2 * LINES, "By chance, or nature's changing course"),  # longer than the context window
    ]
    texts = [context + continuation for context, continuation in pairs]
    prompts = [tokenizer.encode(text) for text in texts] if prompt_type == "ids" else texts
    body = HARNESS_LOGLIKELIHOOD | {"prompt": prompts}
    answer = web.post(f"{server.url}/v1/completions", json=body, headers=HARNESS_HEADERS)
    answer.raise_for_status()
    read = harness_reads(answer.json(), [len(context) for context, _ in pairs])
    for (context, continuation), (loglikelihood, is_greedy) in zip(pairs, read, strict=True):
        expected = rows(context + continuation)[-len(continuation) :]
        assert loglikelihood == near(sum(logprob for logprob, _ in expected))
        assert is_greedy == all(logprob == max(row.values()) for logprob, row in expected)
    assert {is_greedy for _, is_greedy in read} == {True, False}


def test_harness_generates_greedily_up_to_the_stop(server, tokenizer, greedy):
    contexts = ["KING RICHARD ", "ROMEO:\nWhat "]
    body = HARNESS_GENERATE | {"prompt": [tokenizer.encode(context) for context in contexts]}
    answer = web.post(f"{server.url}/v1/completions", json=body, headers=HARNESS_HEADERS).json()
    texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
    assert texts == {i: greedy(context, 20).partition("\n\n")[0] for i, context in enumerate(contexts)}


def test_harness_uses_the_servers_tokenizer(server, tokenizer):
    body = {"prompt": "ROMEO:\n", "add_special_tokens": False}
    answer = web.post(f"{server.url}/tokenize", json=body, headers=HARNESS_HEADERS).json()
    assert answer["tokens"] == tokenizer.encode("ROMEO:\n")
    assert answer["count"] == 7
    assert answer["max_model_len"] >= 7
    answer = web.post(f"{server.url}/detokenize", json={"tokens": answer["tokens"]}, headers=HARNESS_HEADERS)
    assert answer.json()["prompt"] == "ROMEO:\n"


# -- the openai SDK --


def test_sdk_lists_and_retrieves_the_model(client):
    models = client.models.list().data
    assert [(model.id, model.object) for model in models] == [("chargpt", "model")]
    assert client.models.retrieve("chargpt") == models[0]
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("gpt-4")
    assert raised.value.code == "model_not_found"


@pytest.mark.parametrize("count", [0, 3, 65])
def test_sdk_logprobs_equal_transformers(client, rows, count):
    """Before temperature is applied."""
    answer = client.completions.create(
        model="chargpt", prompt="ROMEO:", max_tokens=20, logprobs=count, temperature=1.5, seed=1
    )
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert logprobs.tokens == list(choice.text)
    assert logprobs.text_offset == list(range(20))
    expected = rows("ROMEO:" + choice.text)[-20:]
    assert logprobs.token_logprobs == near([logprob for logprob, _ in expected])
    outside = 0
    for character, logprob, given, (_, row) in zip(
        choice.text, logprobs.token_logprobs, logprobs.top_logprobs, expected, strict=True
    ):
        assert given[character] == logprob
        assert given == near({c: row[c] for c in given})
        top = [*given.values()] if character in list(row)[:count] else [v for c, v in given.items() if c != character]
        assert sorted(top, reverse=True) == near([*row.values()][:count])
        outside += len(given) - len(top)
    assert (count == 65) == (outside == 0)
    if count == 65:
        assert all(math.fsum(map(math.exp, given.values())) == pytest.approx(1) for given in logprobs.top_logprobs)


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_sdk_echo_returns_the_prompt_and_its_logprobs(client, rows, max_tokens):
    options = {"model": "chargpt", "prompt": LINES, "max_tokens": max_tokens, "seed": 1, "echo": True}
    answer = client.completions.create(**options, logprobs=1)
    choice = answer.choices[0]
    assert choice.text.startswith(LINES)
    assert len(choice.text) == len(LINES) + max_tokens
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(LINES), max_tokens)
    logprobs = choice.logprobs
    assert logprobs.tokens == list(choice.text)
    assert logprobs.text_offset == list(range(len(choice.text)))
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    expected = rows(choice.text)
    assert logprobs.token_logprobs[1:] == near([logprob for logprob, _ in expected])
    for given, (logprob, row) in zip(logprobs.top_logprobs[1:], expected, strict=True):
        assert len(given) == (1 if logprob == max(row.values()) else 2)
        assert max(given.values()) == near(max(row.values()))
    plain = client.completions.create(**options)
    assert (plain.choices[0].text, plain.choices[0].logprobs) == (choice.text, None)


def test_sdk_logprobs_end_at_the_stop(client, greedy):
    text = greedy("ROMEO:", 30)
    stop = text[12:15]
    answer = client.completions.create(
        model="chargpt", prompt="ROMEO:", max_tokens=30, temperature=0, stop=[stop], logprobs=2
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    assert choice.logprobs.tokens == list(choice.text)
    assert len(choice.logprobs.top_logprobs) == len(choice.text) == answer.usage.completion_tokens


@pytest.mark.parametrize("echo", [False, True])
def test_sdk_stream_equals_the_whole_response(client, echo):
    options = {"model": "chargpt", "prompt": ["ROMEO:", "A"], "n": 2, "max_tokens": 15, "logprobs": 2, "seed": 1}
    whole = client.completions.create(**options, echo=echo)
    texts, finish_reasons = [""] * 4, [None] * 4
    logprobs = [{"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for _ in range(4)]
    *chunks, last = client.completions.create(**options, echo=echo, stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            finish_reasons[choice.index] = choice.finish_reason
            for name, values in logprobs[choice.index].items():
                values += getattr(choice.logprobs, name)
    assert texts == [choice.text for choice in whole.choices]
    assert finish_reasons == ["length"] * 4
    for streamed, expected in zip(logprobs, [choice.logprobs for choice in whole.choices], strict=True):
        assert (streamed["tokens"], streamed["text_offset"]) == (expected.tokens, expected.text_offset)
        assert streamed["token_logprobs"] == near(expected.token_logprobs)
        for given, top in zip(streamed["top_logprobs"], expected.top_logprobs, strict=True):
            assert given == near(top)
    assert (last.choices, last.usage) == ([], whole.usage)


def test_sdk_n_returns_n_completions_per_prompt(client):
    answer = client.completions.create(
        model="chargpt", prompt=["ROMEO:", "JULIET:"], n=3, max_tokens=12, seed=1, logprobs=0, echo=True
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text.partition(":")[0] for choice in answer.choices] == ["ROMEO"] * 3 + ["JULIET"] * 3
    assert len({choice.text for choice in answer.choices}) == 6
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6 + 7, 6 * 12)


def test_sdk_best_of_returns_the_likeliest(client):
    options = {"model": "chargpt", "prompt": "ROMEO:", "max_tokens": 25, "seed": 1}
    candidates = client.completions.create(**options, n=6, logprobs=0).choices
    ranked = sorted(candidates, key=lambda choice: sum(choice.logprobs.token_logprobs), reverse=True)
    assert ranked[:2] != candidates[:2]
    best = client.completions.create(**options, n=2, best_of=6).choices
    assert [choice.index for choice in best] == [0, 1]
    assert [choice.text for choice in best] == [choice.text for choice in ranked[:2]]
    assert [choice.logprobs for choice in best] == [None, None]
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(**options, n=1, best_of=2, stream=True)
    assert raised.value.param == "best_of"


def test_sdk_suffix_improves_the_fit_of_the_middle(client, rows):
    options = {"model": "chargpt", "prompt": "ROMEO:\nI will", "max_tokens": 40, "seed": 1}
    suffix = "\n\nJULIET:"
    plain = client.completions.create(**options).choices[0].text
    answer = client.completions.create(**options, suffix=suffix)
    middle = answer.choices[0].text
    assert 0 < len(middle) <= 40
    assert answer.usage.completion_tokens >= len(middle)
    assert client.completions.create(**options, suffix=suffix).choices[0].text == middle

    def fit(text):
        return sum(logprob for logprob, _ in rows(options["prompt"] + text + suffix)[-len(suffix) :])

    assert fit(middle) > fit(plain)


def test_sdk_logit_bias_bans_and_forces_ids(client, tokenizer):
    options = {"model": "chargpt", "prompt": "ROMEO:", "max_tokens": 60, "seed": 1}
    e, z = tokenizer.encode("ez")
    assert "e" in client.completions.create(**options).choices[0].text
    assert "e" not in client.completions.create(**options, logit_bias={str(e): -100}).choices[0].text
    assert client.completions.create(**options, logit_bias={str(z): 100}).choices[0].text == "z" * 60


@pytest.mark.parametrize(
    "penalties", [{"frequency_penalty": 0.6}, {"presence_penalty": 1.5}, {"frequency_penalty": -2}]
)
def test_sdk_penalties_follow_openais_definition(client, greedy, penalties):
    options = {"model": "chargpt", "prompt": "ROMEO:", "max_tokens": 40}
    expected = greedy("ROMEO:", 40, **penalties)
    assert expected != greedy("ROMEO:", 40)
    assert client.completions.create(**options, temperature=0, **penalties).choices[0].text == expected


@pytest.mark.parametrize(
    ("options", "kind", "param", "code"),
    [
        ({"prompt": "Caf\u00e9"}, openai.BadRequestError, "prompt", "unknown_character"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens", None),
        ({"temperature": -1}, openai.BadRequestError, "temperature", None),
        ({"n": 0}, openai.BadRequestError, "n", None),
        ({"n": 2, "best_of": 1}, openai.BadRequestError, "best_of", None),
        ({"logprobs": 66}, openai.BadRequestError, "logprobs", None),
        ({"logit_bias": {"65": 1}}, openai.BadRequestError, "logit_bias", None),
        ({"presence_penalty": 2.1}, openai.BadRequestError, "presence_penalty", None),
        ({"model": "gpt-4"}, openai.NotFoundError, "model", "model_not_found"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_sdk_raises_typed_errors(client, options, kind, param, code, stream):
    with pytest.raises(kind) as raised:
        client.completions.create(**({"model": "chargpt", "prompt": "A"} | options), stream=stream)
    error = raised.value
    assert (error.type, error.param, error.code) == ("invalid_request_error", param, code)
    assert param in error.body["message"]
    assert error.request_id


# -- curl --


@pytest.fixture
def curl(server):
    path = program("curl")

    def command(*arguments):
        return [path, "-sS", "--max-time", "60", "--noproxy", "*", *arguments, f"{server.url}/generate"]

    return command


def test_curl_receives_a_whole_response(curl):
    body = '{"prompt": "ROMEO:", "max_tokens": 20, "seed": 1}'
    arguments = curl("--fail-with-body", "-w", "\n%{http_code} %{content_type}", "-d", body)
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    answer, status = done.stdout.splitlines()
    assert status == "200 application/json"
    assert len(json.loads(answer)["choices"][0]["text"]) == 20


def test_curl_shows_a_stream_during_generation(curl, server):
    body = json.dumps({"prompt": "ROMEO:", "max_tokens": ENDLESS, "seed": 1, "stream": True})
    with subprocess.Popen(curl("-N", "-d", body), stdout=subprocess.PIPE, text=True) as process:
        shown = [json.loads(data) for data in itertools.islice(events(process.stdout), 2)]
        assert process.poll() is None
        server.wait_until_metric("chargpt_num_requests_running", 1)
        process.kill()
    assert [piece["finish_reason"] for piece in shown] == [None, None]
    server.wait_until_metric("chargpt_num_requests_running", 0)


def test_curl_stream_ends_with_done(curl):
    body = '{"prompt": "ROMEO:", "max_tokens": 20, "seed": 1, "stream": true}'
    done = subprocess.run(curl("-N", "-d", body), capture_output=True, text=True)
    *shown, last = pieces(done.stdout.splitlines())
    assert last["usage"]["completion_tokens"] == 20
    assert len(text_of(shown)) == 20


def test_curl_reports_an_error(curl):
    arguments = curl("--fail-with-body", "-w", "\n%{http_code}", "-d", '{"prompt": "A", "max_tokens": "many"}')
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 22
    body, status = done.stdout.splitlines()
    assert status == "400"
    assert json.loads(body)["error"]["param"] == "max_tokens"


# -- a browser --

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


@pytest.fixture(scope="module")
def browser():
    chromium = program("browser")
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--headless"])
        yield browser
        browser.close()


def event_source(browser, server, query):
    """What a same-origin page sees, and (status, Last-Event-ID) of each exchange."""
    with browser.new_context(bypass_csp=True) as context:
        page = context.new_page()
        page.goto(f"{server.url}/livez")
        responses = []
        page.on("response", lambda response: responses.append(response))
        seen = page.evaluate(EVENT_SOURCE, f"/generate?{query}")
        return seen, [(response.status, response.request.header_value("last-event-id")) for response in responses]


def test_event_source_receives_the_text_once(browser, server):
    prompt = "ROMEO:\nWhat & why?"
    body = {"prompt": prompt, "max_tokens": 40, "seed": 1, "temperature": 0.8}
    expected = web.post(f"{server.url}/generate", json=body).json()["choices"][0]
    seen, exchanges = event_source(browser, server, str(httpx.QueryParams(body)))
    assert (seen["text"], seen["finish_reason"]) == (expected["text"], "length")
    assert seen["end"] == "done"
    assert exchanges == [(200, None), (204, "done")]
    assert seen["errors"] == 2  # end of stream, then 204


def test_event_source_does_not_retry_an_invalid_request(browser, server):
    seen, exchanges = event_source(browser, server, "prompt=ROMEO&max_tokens=many")
    assert exchanges == [(400, None)]
    assert (seen["text"], seen["errors"]) == ("", 1)
