"""The pages at / and /docs, in headless Chromium against a running server with the bundled checkpoint."""

import contextlib
import json
import math
import re
import signal
import subprocess
import sys

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from service.http.routes.files import STATIC
from service.settings import BUNDLED
from tests.helpers import VOCABULARY, lasting, save_random, serving, wait_until, web
from tests.toolbox.http import PATIENCE, events
from tests.toolbox.launch import free_port
from tests.toolbox.needs import program

KEY = "a-key-for-the-page"
VIEWS = ("write", "read", "attend")

pytestmark = pytest.mark.needs("browser")


@pytest.fixture(scope="module")
def server(bundled):
    return bundled


@pytest.fixture
def visit(browser, server):
    """Opens the page at a fragment. At the end: no errors in the console but for refusals, no other server asked."""
    expect.set_options(timeout=1000 * PATIENCE)
    contexts, problems, asked = [], [], []

    def visit(fragment="", url=server.url + "/", may_fail=False, **options):
        context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        contexts.append(context)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))

        def note(message):
            is_refusal = may_fail and message.text.startswith("Failed to load resource: ")
            if message.type in ("error", "warning") and not is_refusal:
                problems.append(message.text)

        page.on("console", note)
        page.goto(url + fragment)
        if not may_fail:
            expect(page.locator("#dot")).to_have_class("dot ready")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert problems == []
    assert all(url.startswith("http://127.0.0.1:") for url in asked)


def fill(page, **fields):
    for name, value in fields.items():
        field = page.locator(f"#{name}")
        if field.get_attribute("type") == "range":
            field.evaluate(
                "(it, value) => { it.value = value; it.dispatchEvent(new Event('input', {bubbles: true})); }", value
            )
        else:
            field.fill(str(value))


def write(page, **fields):
    """Presses Write; the texts once they are complete."""
    fill(page, **fields)
    page.click("#go")
    expect(page.locator("#summary")).to_have_text(re.compile("^Done"))
    return texts(page)


def texts(page):
    return ["".join(it.locator("span[data-c]").all_text_contents()) for it in page.locator("#panes .written").all()]


def copied(page, button):
    """What a button copies."""
    page.click(button)
    expect(page.locator(button)).to_have_text("Copied")
    return page.evaluate("navigator.clipboard.readText()")


def generate(server, **body):
    body = {"prompt": "GLOUCESTER:\n", "temperature": 0.8} | body
    return web.post(f"{server.url}/generate", json=body).raise_for_status().json()["choices"]


# -- files --


def test_files_are_small_cached_by_etag_and_sent_with_a_strict_policy(server):
    paths = ["", *(f"page/{file.name}" for file in STATIC.iterdir() if file.name != "index.html")]
    total = 0
    for path in paths:
        answer = web.get(f"{server.url}/{path}").raise_for_status()
        total += len(answer.content)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy and "unsafe" not in policy
        assert {"frame-ancestors 'none'", "require-trusted-types-for 'script'", "trusted-types 'none'"} <= {
            *policy.split("; ")
        }
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
        again = web.get(answer.url, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert web.get(answer.url, headers={"If-None-Match": '"other"'}).status_code == 200
        head = web.head(answer.url)
        assert (head.status_code, head.headers["etag"], head.content) == (200, answer.headers["etag"], b"")
        text = answer.text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|<style|style=|\son[a-z]+=|localStorage|sessionStorage", text), path
    assert total < 90_000
    for path in ("page/", "page/nothing.js", "page/%2e%2e/page.py"):
        assert web.get(f"{server.url}/{path}").status_code == 404


# -- write --


def test_a_text_is_written_as_the_seed_says_with_its_certainty(visit, server):
    page = visit()
    expect(page.locator("#prompt")).to_have_value("GLOUCESTER:\n")
    (choice,) = generate(server, max_tokens=300, seed=11, logprobs=8)
    assert write(page, max_tokens=300, seed=11) == [choice["text"]]
    summary = page.locator("#summary").inner_text()
    how = r"Done: the length is reached\. First character after [\d.]+ ms(, then [\d,.]+ characters per second)?"
    assert re.fullmatch(how + r"\.", summary), summary
    expect(page.locator(".foot")).to_contain_text("seed 11")
    expect(page.locator(".foot")).to_contain_text("300 characters")
    spans, values = page.locator("#panes .written span[data-c]"), choice["logprobs"]["token_logprobs"]
    likely, surprising = (spans.nth(values.index(extreme(values))) for extreme in (max, min))
    expect(likely).to_have_class(re.compile("s0"))
    expect(surprising).to_have_class(re.compile("s[45]"))
    page.uncheck("#certainty")
    expect(page.locator("#panes .written")).to_have_class(re.compile("plain"))
    assert surprising.evaluate("it => getComputedStyle(it).backgroundColor") == "rgba(0, 0, 0, 0)"


def test_several_samples_come_side_by_side_and_one_is_replayed(visit, server):
    page = visit()
    expected = [choice["text"] for choice in generate(server, max_tokens=60, seed=5, n=3)]
    assert write(page, max_tokens=60, seed=5, n=3) == expected
    tops = [it.bounding_box()["y"] for it in page.locator("#panes .written").all()]
    assert len(set(tops)) == 1
    page.locator(".foot button", has_text="Replay").nth(2).click()
    expect(page.locator("#seed")).to_have_value("7")
    expect(page.locator("#panes .written")).to_have_count(1)
    expect(page.locator(".foot")).to_contain_text("seed 7")
    expect(page.locator("#summary")).to_have_text(re.compile("^Done"))
    assert texts(page) == expected[2:]


def test_an_example_is_there_when_the_page_opens_and_stop_frees_the_slot(visit, server):
    page = visit()
    expect(page.locator("#summary")).to_have_text(re.compile("^Done"))
    assert [len(text) for text in texts(page)] == [400]
    page.uncheck("#certainty")
    before = server.metric("chargpt_request_success_total", finished_reason="abort")
    fill(page, max_tokens=50_000_000)
    page.click("#go")
    expect(page.locator("#panes .written span[data-c]").nth(50)).to_be_attached()
    server.wait_until_metric("chargpt_num_requests_running", 1)
    page.click("#stop")
    expect(page.locator("#summary")).to_have_text(re.compile("^Stopped. First character"))
    expect(page.locator("#stop")).to_be_disabled()
    server.wait_until_metric("chargpt_num_requests_running", 0)
    server.wait_until_metric("chargpt_request_success_total", before + 1, finished_reason="abort")


def test_hover_shows_alternatives_and_a_click_branches(visit, server):
    page = visit()
    (choice,) = generate(server, max_tokens=80, seed=2, logprobs=8)
    assert write(page, max_tokens=80, seed=2) == [choice["text"]]
    page.locator("#panes .written span[data-c]").nth(40).hover()
    expect(page.locator("#peek")).to_be_visible()
    tops = choice["logprobs"]["top_logprobs"][40]
    assert page.locator("#peek button").count() == len(tops)
    bits = -choice["logprobs"]["token_logprobs"][40] / math.log(2)
    expect(page.locator("#peek")).to_contain_text(f"{bits:.1f} bits")
    other = next(c for c in sorted(tops, key=tops.get, reverse=True) if c != choice["text"][40] and c.isalpha())
    page.fill("#seed", "")
    page.locator("#peek button", has=page.get_by_text(other, exact=True)).click()
    expect(page.locator("#summary")).to_have_text(re.compile("^Done"))
    (text,) = texts(page)
    kept = choice["text"][:40] + other
    assert text.startswith(kept) and len(text) == 41 + 80
    seed = int(re.search(r"seed (\d+)", page.locator(".foot").inner_text())[1])
    (branch,) = generate(server, prompt="GLOUCESTER:\n" + kept, max_tokens=80, seed=seed)
    assert text == kept + branch["text"]
    page.click("#undo")
    assert texts(page) == [choice["text"]]


def test_continue_takes_the_answer_into_the_text_and_undo_takes_it_back(visit, server):
    page = visit()
    (first,) = write(page, max_tokens=40, seed=2)
    page.get_by_role("button", name="Continue").press("Enter")
    expect(page.locator("#summary")).to_have_text(re.compile("^Done"))
    expect(page.locator("#prompt")).to_have_value("GLOUCESTER:\n" + first)
    expect(page.locator("#seed")).to_have_value("3")
    (more,) = generate(server, prompt="GLOUCESTER:\n" + first, max_tokens=40, seed=3)
    assert texts(page) == [first + more["text"]]
    expect(page.locator("#panes .written")).to_be_focused()
    link = copied(page, "#share")
    again = visit(url=link)
    expect(again.locator("#summary")).to_have_text(re.compile("^Done"))
    assert texts(again) == [more["text"]]
    assert len(write(page, n=3)) == 3
    page.get_by_role("button", name="Continue").nth(1).click()
    expect(page.locator("#panes .written")).to_have_count(3)
    expect(page.locator("#summary")).to_have_text(re.compile("^Done"))
    assert [len(text) for text in texts(page)] == [80] * 3
    for panes, seed in ((3, "3"), (1, "3"), (1, "2")):
        page.click("#undo")
        expect(page.locator("#panes .written")).to_have_count(panes)
        expect(page.locator("#seed")).to_have_value(seed)
    expect(page.locator("#prompt")).to_have_value("GLOUCESTER:\n")
    assert texts(page) == [first]


def test_a_failed_write_leaves_the_last_text(visit):
    page = visit(may_fail=True)
    kept = write(page, max_tokens=40, seed=2)
    fill(page, prompt="café")
    page.click("#go")
    expect(page.locator("#write-error")).to_contain_text("“é”")
    assert texts(page) == kept
    expect(page.locator("#summary")).to_have_text(re.compile("^Done"))
    expect(page.locator("#prompt")).to_have_value("café")  # to be mended
    assert page.locator("#write .editor mark").all_text_contents() == ["é"]
    page.route("**/generate", lambda route: route.abort())
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#write-error")).to_have_text(re.compile("^The server does not answer"))
    assert texts(page) == kept
    for name, value in {"prompt": "café", "seed": "2"}.items():
        expect(page.locator(f"#{name}")).to_have_value(value)


def test_two_temperatures_of_one_seed_stand_side_by_side(visit, server):
    page = visit()
    fill(page, temperature="0.5", second="1.5", max_tokens=60)
    expect(page.locator("#n")).to_be_disabled()
    found = write(page)
    expect(page.locator("#panes p")).to_have_text(["Temperature 0.5", "Temperature 1.5"])
    (seed,) = set(re.findall(r"seed (\d+)", page.locator("#panes").inner_text()))
    options = {"max_tokens": 60, "seed": int(seed)}
    expected = [generate(server, temperature=it, **options)[0]["text"] for it in (0.5, 1.5)]
    assert found == expected and len(set(expected)) == 2
    done = subprocess.run([sys.executable, "-c", copied(page, "#copy-python")], capture_output=True, check=True)
    assert done.stdout.decode() == "".join(f"{text}\n" for text in expected)
    again = visit(url=copied(page, "#share"))
    expect(again.locator("#summary")).to_have_text(re.compile("^Done"))
    assert texts(again) == expected
    page.locator("#panes span[data-c]").nth(60 + 20).hover()
    page.locator("#peek button").nth(1).click()
    expect(page.locator("#summary")).to_have_text(re.compile("^Done"))
    left, right = texts(page)
    assert left == expected[0] and len(right) == 81
    expect(page.locator("#panes p")).to_have_text(["Temperature 0.5", "Temperature 1.5"])


def test_alternatives_and_tabs_by_keyboard(visit):
    page = visit()
    write(page, max_tokens=30, seed=2)
    page.locator("#panes .written").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    expect(page.locator("#peek")).to_be_visible()
    expect(page.locator("#panes .written span[data-c]").nth(2)).to_have_class(re.compile("here"))
    expect(page.locator("#said")).to_have_text(re.compile(r"bits\. "))
    page.keyboard.press("Enter")
    expect(page.locator("#peek button").first).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#peek button").nth(1)).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#peek")).to_be_hidden()
    expect(page.locator("#panes .written")).to_be_focused()
    page.locator("#tab-write").focus()
    for view in ("read", "attend", "write"):
        page.keyboard.press("ArrowRight")
        expect(page.locator(f"#tab-{view}")).to_be_focused()
        expect(page.locator(f"#{view}")).to_be_visible()
        assert page.locator("main > section:visible").count() == 1


def test_a_link_restores_everything_and_copies_run(visit, server):
    page = visit()
    fields = {"prompt": "KING:\nWhat's it", "max_tokens": 50, "temperature": "1.2", "top_p": "0.9", "n": 2}
    expected = write(page, **fields)
    link = copied(page, "#share")
    assert link == page.url and "seed=" in link
    other = visit(url=link)
    expect(other.locator("#summary")).to_have_text(re.compile("^Done"))
    assert texts(other) == expected
    for name, value in fields.items():
        expect(other.locator(f"#{name}")).to_have_value(str(value))
    source = copied(other, "#copy-python")
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "".join(f"{text}\n" for text in expected)
    command = copied(other, "#copy-curl").replace("curl", program("curl"), 1)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert [choice["text"] for choice in json.loads(done.stdout)["choices"]] == expected


def test_constraints_are_checked_as_one_types(visit, server):
    page = visit(may_fail=True)
    page.click("#more-constraint summary")
    page.select_option("#constraint", "regex")
    note = page.locator("#constraint-note")
    page.fill("#regex", "[a-z]+(")
    refusal = web.post(f"{server.url}/generate", json={"prompt": "a", "regex": "[a-z]+("}).json()["error"]["message"]
    expect(note).to_have_text(re.compile(re.escape(refusal[1:])))
    expect(note).to_have_class("error")
    page.fill("#regex", "[a-z]{90}")
    expect(note).to_have_text(re.compile("^For example: [a-z]{90}$"))
    assert note.evaluate("it => it.scrollWidth <= it.clientWidth"), "a long word is broken"
    page.fill("#regex", "[A-Z][a-z]{2,5}!")
    expect(note).to_have_text(re.compile("^For example: [A-Z][a-z]{2,5}!$"))
    (text,) = write(page)
    assert re.fullmatch("[A-Z][a-z]{2,5}!", text)
    page.select_option("#constraint", "choice")
    page.fill("#choice", "Ay\nNo")
    expect(note).to_have_text(re.compile("^For example: (Ay|No)$"))
    assert write(page)[0] in ("Ay", "No")
    page.select_option("#constraint", "regex")
    page.fill("#regex", "[a-zA-Z]+")
    page.check("#exact")
    fill(page, seed=3)
    body = {"prompt": page.input_value("#prompt"), "regex": "[a-zA-Z]+", "temperature": 0.8, "seed": 3, "exact": True}
    answer = web.post(f"{server.url}/generate", json=body | {"max_tokens": int(page.input_value("#max_tokens"))}).json()
    assert write(page) == [answer["choices"][0]["text"]]
    count = answer["chargpt"]["exact"]["candidates"]
    expect(page.locator("#summary")).to_have_text(re.compile(f"% of {count:,} candidates? matched.$"))


def test_output_is_text_and_never_markup(visit):
    page = visit(may_fail=True)
    markup = "<img src=x onerror=alert(1)>"
    event = json.dumps({"index": 0, "text": markup, "finish_reason": "stop", "seed": 1})
    answer = {"content_type": "text/event-stream", "body": f"data: {event}\n\ndata: [DONE]\n\n"}
    page.route("**/generate", lambda route: route.fulfill(**answer))
    assert write(page, prompt="<b>") == [markup]
    assert page.locator("main img").count() == page.locator("#panes .written b").count() == 0


# -- read --


def test_surprise_is_that_of_the_service(visit, server):
    page = visit()
    page.click("#tab-read")
    text = "To be, or not to bee"
    page.fill("#text", text)
    score = web.post(f"{server.url}/v1/score", json={"texts": text}).json()["data"][0]
    expect(page.locator("#read-numbers .big")).to_have_text(f"{score['bits_per_character']:.2f}")
    bits = f"{score['nats'] / math.log(2):.0f} bits for {len(text) - 1} characters"
    expect(page.locator("#read-numbers")).to_contain_text(bits)
    spans = page.locator("#read-text span[data-c]")
    expect(spans).to_have_count(len(text))
    worst = max(range(1, len(text)), key=lambda i: score["character_nats"][i])
    expect(spans.nth(worst)).to_have_class(re.compile("s[45]"))
    spans.nth(worst).hover()
    expect(page.locator("#peek .row").nth(7)).to_be_visible()
    assert page.locator("#peek button").count() == 0
    losses = web.get(f"{server.url}/info").json()["model"]["training"]["losses"]
    usual = {name: f"{losses[name] / math.log(2):.2f}" for name in ("whole", "bigram")}
    numbers, verdict = page.locator("#read-numbers"), page.locator("#read-verdict")
    expect(numbers).to_contain_text(f"Validation text{usual['whole']}… by counting pairs{usual['bigram']}")
    expect(verdict).to_have_text(re.compile("^This text surprises the model more than its validation text"))
    page.fill("#text", "zxqj vvkz, qqx")
    expect(verdict).to_contain_text("Counting pairs of characters predicts")
    page.fill("#text", "KING RICHARD III:\nWhat is the matter?\n\n" * 3)
    expect(verdict).to_have_text(re.compile("^This text surprises the model less than its validation text"))


# -- attend --


def test_heat_maps_show_the_weights_of_the_service(visit, server):
    page = visit()
    page.click("#tab-attend")
    text = "ROMEO:\nO Juliet"
    page.fill("#short", text)
    expect(page.locator("#looks span")).to_have_count(len(text))
    expect(page.locator("#heads button")).to_have_count(24)
    page.locator("#heads button").nth(9).click()
    expect(page.locator("#heads button").nth(9)).to_have_attribute("aria-pressed", "true")
    answer = web.post(f"{server.url}/v1/attention", json={"text": text, "layer": 2, "head": 1, "scores": True}).json()
    weights, scores = answer["data"][0]["weights"], answer["data"][0]["scores"]
    size = len(text)
    pixels = page.evaluate(
        "size => [...document.querySelector('#map').getContext('2d').getImageData(0, 0, size, size).data]", size
    )
    opacity = [[pixels[4 * (t * size + j) + 3] for j in range(size)] for t in range(size)]
    for t in range(size):
        assert opacity[t][t + 1 :] == [0] * (size - t - 1)
        for j in range(t + 1):
            assert opacity[t][j] == pytest.approx(255 * weights[t][j] ** 0.6, abs=1.5)

    page.locator("#looks span").nth(9).hover()
    best = max(range(10), key=lambda j: weights[9][j])
    expect(page.locator("#map-note")).to_have_text(
        re.compile(f"Layer 3, head 2: “J” looks at “{answer['text'][best].strip() or '.'}”")
    )
    expect(page.locator("#map-legend")).to_have_text(re.compile("^The stronger the colour, the larger the weight"))
    said = page.locator("#step")
    likely = web.post(f"{server.url}/v1/next", json={"prompt": text[:10]}).json()["data"][0]["distribution"]
    for name, numbers in {
        "Plain average": ["10", f"{1 / 10:.3f}"],
        "Queries": [f"{min(scores[9][:10]):.2f}".replace("-", "−"), f"{max(scores[9][:10]):.2f}".replace("-", "−")],
        "Scale": [f"√32 = {32**0.5:.2f}"],
        "Mask": [f"{size - 10}"],
        "Softmax": ["1.00"],
        "Values": ["32 numbers", "sum of all 10"],
        "Heads": ["layer 3"],
        "Next": [f"{it['character'].strip() or '␣'} {percent(it['probability'])}" for it in likely[:5]],
    }.items():
        page.get_by_role("radio", name=re.compile(name)).click()
        for number in numbers:
            expect(said).to_contain_text(number)
    page.get_by_role("radio", name="Values").click()
    expect(page.locator("#step .strip")).to_have_count(6)
    page.click("#attend details summary")
    row = page.locator("#row tbody tr").nth(best).locator("td").all_text_contents()
    assert row[0] == "0.100" and float(row[4]) == pytest.approx(weights[9][best], abs=6e-4)
    page.locator("#looks").focus()
    page.keyboard.press("Home")
    expect(page.locator("#map-note")).to_have_text(re.compile("“R” looks at “R” itself \\(100"))


def percent(p):
    return "<\u00a00.1\u00a0%" if p < 0.001 else f"{100 * p:.{1 if p < 0.0995 else 0}f}\u00a0%"


# -- errors --


def test_unknown_characters_are_marked_in_the_prompt(visit):
    page = visit(may_fail=True)
    fill(page, prompt="a naïve 😀 café")
    page.click("#go")
    error = page.locator("#write-error")
    expect(error).to_have_text("The model has never seen “ï”, “😀”, “é”, marked above. Replace or remove them.")
    assert page.locator("#write .editor mark").all_text_contents() == ["ï", "😀", "é"]
    page.fill("#prompt", "a naive cafe")
    assert page.locator("#write .editor mark").count() == 0
    assert write(page, max_tokens=5)
    expect(error).to_have_text("")


def test_key_busy_gone_and_back_behind_a_prefix(visit, tmp_path):
    keys, port = tmp_path / "keys", free_port()
    keys.write_text(KEY)
    settings = {
        "api_keys_file": keys, "public_docs": "true", "root_path": "/chargpt", "port": port,
        "max_running_requests": 1, "max_queued_requests": 0,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(BUNDLED, **settings))
        page = visit(url=f"{server.url}/chargpt", may_fail=True)  # redirected to /chargpt/
        expect(page.locator("#banner")).to_have_text("This service needs an API key. Type it at the top right.")
        page.click("#go")
        expect(page.locator("#key")).to_be_focused()
        for wrong in ("“quoted”", "not-this-one"):
            page.fill("#key", wrong)
            expect(page.locator("#banner")).to_have_text("This API key is not valid. Check it at the top right.")
        page.fill("#key", KEY)
        expect(page.locator("#facts")).to_contain_text("1,106,176")
        expect(page.locator("#banner")).to_be_hidden()
        page.keyboard.press("Escape")
        write(page, max_tokens=20, seed=1)
        page.click("#share")
        kept = page.url + page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])")
        assert KEY not in kept + page.content()

        headers = {"Authorization": f"Bearer {KEY}"}
        body = {"prompt": "a", "max_tokens": 50_000_000, "stream": True}
        with httpx.stream("POST", f"{server.url}/generate", json=body, headers=headers, timeout=PATIENCE) as busy:
            stream = events(busy)  # kept: its end would end the connection
            next(stream)
            page.click("#go")
            expect(page.locator("#write-error")).to_have_text(
                re.compile(r"^The service is busy \(.+\)\. Try again in \d+ seconds?\.$")
            )
        server.process.kill()
        server.process.wait()
        server.wait_until_gone()
        expect(page.locator("#banner")).to_have_text(re.compile("^The server does not answer"))
        page.click("#go")
        expect(page.locator("#write-error")).to_have_text(re.compile("^The server does not answer"))
        stack.enter_context(serving(BUNDLED, **settings))
        expect(page.locator("#banner")).to_have_text("The server is back.")
        write(page, max_tokens=20)


# -- everyone --


@pytest.mark.tools
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(visit, several, scheme):
    page = visit(url=several.url + "/", color_scheme=scheme, reduced_motion="reduce")

    def check():
        found = Axe().run(page).response["violations"]
        assert not found, [(it["id"], [node["html"][:120] for node in it["nodes"][:3]]) for it in found]

    page.select_option("#model", "records")
    expect(page.locator("#records code")).to_have_count(20)
    page.fill("#matching", "a")
    expect(page.locator("#records mark").first).to_be_attached()
    check()
    page.select_option("#model", "plays")
    expect(page.locator("#prompt")).to_have_value("GLOUCESTER:\n")
    write(page, max_tokens=200, seed=1, temperature="1.5", second="0.5")
    for details in page.locator("#write details summary").all():
        details.click()
    page.locator("#panes .written span[data-c]").nth(30).hover()
    expect(page.locator("#peek")).to_be_visible()
    shown = {"#tab-read": "#read-text span[data-c]", "#tab-attend": "#heads [aria-pressed=true]"}
    for pressed in (None, *shown, "#status summary"):
        if pressed:
            page.click(pressed)
        if pressed in shown:
            expect(page.locator(shown[pressed]).first).to_be_visible()
        check()


def test_a_phone_scrolls_in_one_direction_only(visit):
    page = visit(is_mobile=True, has_touch=True)
    page.set_viewport_size({"width": 360, "height": 740})
    write(page, max_tokens=120, seed=1, n=2)
    for view in VIEWS:
        page.tap(f"#tab-{view}")
        expect(page.locator(f"#{view}")).to_be_visible()
        if view == "attend":
            expect(page.locator("#heads [aria-pressed=true]")).to_be_visible()
            step, heads, character, button = (
                page.locator(it).first.bounding_box() for it in ("#step", "#heads", "#looks span", "#steps button")
            )
            assert step["y"] + step["height"] <= heads["y"], "the explanation comes before the heads"
            assert character["width"] >= 15 and min(character["height"], button["height"]) >= 36, "for a finger"
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
    page.tap("#tab-write")
    page.locator("#panes .written span[data-c]").nth(20).tap()
    expect(page.locator("#peek")).to_be_visible()
    box = page.locator("#peek").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360


# -- several models --


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A server of the bundled model and three small ones; none is the default."""
    folder = tmp_path_factory.mktemp("models")
    for name, characters, about in (
        ("dna", "ACGT", {"example_prompt": "GATTACA"}),
        ("other", "\nROME:一二\t \x1b\u00ad", {"example_prompt": "一二"}),
        ("prose", "".join(VOCABULARY), {"example_prompt": "Dear "}),
        ("records", "\nabc", {"recipe": {"records": True}}),
    ):
        save_random(folder / name, characters, about)
    yield from lasting(",".join([f"plays={BUNDLED}", *(f"{it.name}={it}" for it in sorted(folder.iterdir()))]))


def test_a_vocabulary_of_four_characters_is_enough_for_every_view(visit, several):
    page = visit(url=several.url + "/")
    page.select_option("#model", "dna")
    expect(page.locator("#prompt")).to_have_value("GATTACA")
    (written,) = write(page, max_tokens=40)
    assert len(written) == 40 and set(written) <= set("ACGT")
    page.locator("#panes span[data-c]").first.hover()
    expect(page.locator("#peek button")).to_have_count(4)
    expect(page.locator("#peek .note")).to_contain_text("before temperature")
    page.click("#tab-read")
    (example,) = generate(several, model="dna", prompt="GATTACA", max_tokens=100, seed=7, temperature=1)
    expect(page.locator("#text")).to_have_value("GATTACA" + example["text"])
    expect(page.locator("#read-text span[data-c]")).to_have_count(107)
    expect(page.locator("#read-numbers dt")).to_have_count(3)  # nothing is known of its losses
    expect(page.locator("#read-verdict")).to_be_empty()
    page.click("#tab-attend")
    expect(page.locator("#short")).to_have_value("GATTACA" + example["text"][:1])
    expect(page.locator("#attend-error")).to_be_empty()
    wait_until(lambda: page.locator("#heads > *").count() == 8)


def test_each_of_several_models_is_asked_by_its_name_and_suggests_its_own_text(visit, several):
    """Until something is typed."""
    page = visit(url=several.url + "/")
    expect(page.locator("#name")).to_have_text("plays")
    expect(page.locator("#prompt")).to_have_value("GLOUCESTER:\n")
    options = {"max_tokens": 30, "seed": 1}
    assert write(page, **options) == [choice["text"] for choice in generate(several, model="plays", **options)]
    page.select_option("#model", "prose")  # which knows every character of the plays
    expect(page.locator("#prompt")).to_have_value("Dear ")
    for tab, box in (("read", "text"), ("attend", "short")):
        page.click(f"#tab-{tab}")
        expect(page.locator(f"#{box}")).to_have_value(re.compile("^Dear "))
    page.click("#tab-write")
    page.select_option("#model", "other")
    expect(page.locator("#name")).to_have_text("other")
    expect(page.locator("#prompt")).to_have_value("一二")
    expect(page.locator("#panes .said")).to_have_text("一二")  # its example, in place of the plays
    page.click("#more-vocabulary summary")
    expect(page.locator("#more-vocabulary summary")).to_have_text("The 12 characters that the model knows")
    vocabulary = web.get(f"{several.url}/info?model=other").json()["model"]["vocabulary"]
    readable = {"\n": "↵ line break", "\t": "⇥ tab", " ": "␣ space", "\x1b": "␛ U+001B", "\xad": "U+00AD"}
    expect(page.locator("#vocabulary span")).to_have_text([readable.get(c, c) for c in vocabulary])
    expect(page.locator("#summary")).to_have_text(re.compile("^Done"))
    expected = [choice["text"] for choice in generate(several, model="other", prompt="一二", **options)]
    assert write(page) == expected
    page.click("#share")
    again = visit(url=page.url)
    expect(again.locator("#summary")).to_have_text(re.compile("^Done"))
    assert texts(again) == expected
    fill(page, prompt="ROME", seed="")
    page.select_option("#model", "plays")
    expect(page.locator("#name")).to_have_text("plays")
    expect(page.locator("#prompt")).to_have_value("ROME")
    page.click("#share")
    assert "seed=" not in page.url, "that of another model's text"
    page = visit("#prompt=a&model=gone", several.url + "/", may_fail=True)
    expect(page.locator("#banner")).to_have_text(re.compile("^The model gone is not served any more"))


def test_an_open_page_follows_when_its_models_are_replaced(visit, tmp_path):
    """By SIGHUP: a text of the old one is not continued by the new one. By a restart with one model instead of two."""
    settings, asked = {"port": free_port(), "max_tokens": 50}, []
    save_random(tmp_path / "live", "\nabc", {"example_prompt": "a"})
    with serving(tmp_path / "live", **settings) as server:
        page = visit(url=server.url + "/", may_fail=True)
        expect(page.locator("#max_tokens")).to_have_value("50")  # no more than the server allows
        expect(page.locator("#panes span[data-c]")).to_have_count(50)
        before = texts(page)
        new = save_random(tmp_path / "live", "\nabc", {"example_prompt": "b"}, n_layer=3)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: web.get(f"{server.url}/info").json()["model"]["checkpoint_sha256"] == new.digest)
        page.locator("#panes span[data-c]").nth(3).hover()
        page.locator("#peek button").nth(1).click()
        expect(page.locator("#write-error")).to_contain_text("cannot be branched")
        expect(page.locator("#banner")).to_have_text("The model was replaced by a newer one.")
        expect(page.locator("#facts")).to_contain_text(new.digest[:16])
        assert texts(page) == before
    both = [f"{name}={save_random(tmp_path / name, 'abc').path}" for name in ("one", "two")]
    expect(page.locator("#banner")).to_have_text(re.compile("^The server does not answer"))
    with serving(",".join(both), **settings):
        expect(page.locator("#banner")).to_have_text("The server is back.")
        page.select_option("#model", "two")
        expect(page.locator("#name")).to_have_text("two")
    expect(page.locator("#banner")).to_have_text(re.compile("^The server does not answer"))
    page.on("request", lambda request: asked.append(request.url))
    with serving(tmp_path / "live", **settings):
        expect(page.locator("#banner")).to_have_text(re.compile("^The model two is not served any more"))
        assert len(write(page, prompt="b")[0]) == 50
    assert len(asked) < 60


def test_a_model_of_records_lists_twenty_at_a_time(visit, several):
    page = visit(url=several.url + "/")
    page.select_option("#model", "records")
    expect(page.locator("#name")).to_have_text("records")
    expect(page.locator("#prompt").locator("xpath=../..").locator("label")).to_have_text("Begin a record with")
    items = page.locator("#records code")
    expect(items).to_have_count(20)  # when it opens
    fill(page, prompt="a", seed=1, max_tokens=3)
    page.click("#twenty")
    expect(items.first).to_have_text(re.compile("^a.?.?.?$"))  # another prompt, another list
    expect(items).to_have_count(20)
    page.click("#twenty")
    expect(items).to_have_count(40)
    options = {"model": "records", "prompt": "a", "max_tokens": 3, "n": 20}
    expected = ["a" + choice["text"] for seed in (1, 21) for choice in generate(several, seed=seed, **options)]
    assert items.all_text_contents() == expected and len(set(expected)) < 40
    page.fill("#matching", "a[ab]")
    matches = [found for text in expected for found in re.findall("a[ab]", text)]
    assert page.locator("#records mark").all_text_contents() == matches != []
    count = sum(bool(re.search("a[ab]", text)) for text in expected)
    note = f"40 records, {40 - len(set(expected))} repeated, {count} with a match."
    expect(page.locator("#list-note")).to_have_text(note)
    assert copied(page, "#copy-list").split() == expected
    page.uncheck("#certainty")
    (record,) = write(page)
    assert record == expected[0][1:]
    assert page.get_by_role("button", name="Continue").count() == (len(record) == 3), "a record that has ended"
    page.fill("#matching", "a(")
    expect(page.locator("#list-note")).to_contain_text("Invalid regular expression")
    page.click("#tab-read")  # begins with one of its records
    (example,) = generate(several, model="records", prompt="", max_tokens=100, seed=7)
    expect(page.locator("#text")).to_have_value(example["text"])


def test_records_of_several_lines_are_shown_and_copied_as_such(visit, several):
    page = visit(url=several.url + "/")
    page.select_option("#model", "records")
    expect(page.locator("#records code")).to_have_count(20)
    choice = {"logprobs": {"token_logprobs": [-1.0]}}
    answer = {"choices": [choice | {"text": text} for text in ("ab\nb", "<b>\n\nba")], "chargpt": {"exact": None}}
    page.route("**/generate", lambda route: route.fulfill(json=answer))
    fill(page, max_tokens=9)
    page.click("#twenty")
    expect(page.locator("#records code")).to_have_count(2)
    assert page.locator("#records code").all_inner_texts() == ["ab\nb", "<b>\n\nba"]
    page.fill("#matching", "^b")  # as a search does, at the beginning of each line
    expect(page.locator("#records mark")).to_have_text(["b", "b"])
    expect(page.locator("#list-note")).to_have_text("2 records, 0 repeated, 2 with a match.")
    assert copied(page, "#copy-list") == "ab\nb\n\n<b>\n\nba\n\n"


def test_records_of_several_lines_are_listed_with_their_line_breaks(visit, tmp_path):
    about = {"recipe": {"records": "blank"}, "data": {"record_end": "\x1e"}}
    save_random(tmp_path / "tunes", "\n\x1eabc", about)
    with serving(tmp_path / "tunes") as server:
        page = visit(url=server.url + "/")
        fill(page, prompt="a", seed=1, max_tokens=12)
        page.click("#twenty")
        items = page.locator("#records code")
        expect(items).to_have_count(20)
        expected = ["a" + it["text"] for it in generate(server, prompt="a", max_tokens=12, n=20, seed=1)]
        assert items.all_text_contents() == expected and any("\n" in text.strip("\n") for text in expected)
        assert items.first.evaluate("(it) => getComputedStyle(it).whiteSpace") in ("pre-wrap", "preserve")
        assert copied(page, "#copy-list") == "".join(f"{text}\n\n" for text in expected)


def test_docs_page_works_without_external_requests(browser, server):
    paths = web.get(f"{server.url}/openapi.json").json()["paths"]
    operations = [(method, path) for path, methods in paths.items() for method in methods]
    asked, problems = [], []
    page = browser.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"{server.url}/docs")
    page.wait_for_selector(".opblock")
    assert page.locator(".opblock").count() == len(operations)
    for method, path in operations:
        assert page.locator(f".opblock-{method} [data-path='{path}']").count() == 1
    block = page.locator("#operations-text-generate")
    block.locator(".opblock-summary-control").click()
    block.locator(".execute").click()
    block.locator(".live-responses-table .response-col_status").first.wait_for()
    assert "200" in block.locator(".live-responses-table .response .response-col_status").first.inner_text()
    page.close()
    assert problems == [] and f"{server.url}/generate" in asked
    assert all(url.startswith((f"{server.url}/", "data:")) for url in asked), asked
