"""POST /v1/attention of a running server: bounds, shapes, refusals; its numbers are tested in tests/model."""

import contextlib
import os

import numpy as np
import pytest

from service.http.routes.service import MAX_ATTENTION_TEXTS
from service.model.attention import attention_layers
from tests.helpers import save_random, serving, wait_until, web
from tests.toolbox.http import post, received, sent

TEXT = "To be or"  # as long as the model's block_size


def ask(server, **body):
    return web.post(f"{server.url}/v1/attention", json=body)


def test_every_head_comes_as_ragged_rows_of_the_computed_weights(server, checkpoint):
    ids = checkpoint.tokenizer.encode(TEXT)
    expected = list(attention_layers(checkpoint.load_weights(), checkpoint.config, ids))
    answer = ask(server, text=TEXT, scores=True, values=True).raise_for_status().json()
    assert (answer["text"], answer["n_layer"], answer["n_head"]) == (TEXT, 2, 4)
    assert answer["checkpoint_sha256"] == checkpoint.digest
    assert web.get(f"{server.url}/info").json()["limits"]["max_attention_characters"] == len(TEXT)
    assert [(it["layer"], it["head"]) for it in answer["data"]] == [(i, j) for i in range(2) for j in range(4)]
    for it in answer["data"]:
        assert [len(row) for row in it["weights"]] == list(range(1, len(TEXT) + 1))
        assert [len(row) for row in it["scores"]] == [len(TEXT)] * len(TEXT)
        found = expected[it["layer"]]
        for t, row in enumerate(it["weights"]):
            assert sum(row) == pytest.approx(1, abs=1e-6)
            np.testing.assert_allclose(row, found.weights[it["head"], t, : t + 1], rtol=0, atol=6e-8)
            exponentials = np.exp(np.array(it["scores"][t][: t + 1]) * answer["scale"])
            np.testing.assert_allclose(row, exponentials / exponentials.sum(), rtol=0, atol=1e-4)
        np.testing.assert_allclose(it["scores"], found.scores[it["head"]], rtol=0, atol=6e-6)
        np.testing.assert_allclose(it["values"], found.values[it["head"]], rtol=0, atol=6e-6)


def test_one_layer_one_head_and_short_texts(server):
    whole = ask(server, text=TEXT).json()["data"]
    assert ask(server, text=TEXT, layer=1).json()["data"] == whole[4:]
    assert ask(server, text=TEXT, head=2).json()["data"] == [whole[2], whole[6]]
    assert ask(server, text=TEXT, layer=1, head=0).json()["data"] == [whole[4]]
    assert not {"scores", "values"} & whole[0].keys()
    assert [it["weights"] for it in ask(server, text="T").json()["data"]] == [[[1.0]]] * 8
    assert [it["weights"] for it in ask(server, text="").json()["data"]] == [[]] * 8
    dropped = ask(server, text="T0 be", unknown_characters="drop").json()
    assert (dropped["text"], dropped["dropped_characters"]) == ("T be", 1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text": TEXT + "x"}, "text: at most 8 characters, got 9"),
        ({"text": "T0 be"}, "text: character '0' (U+0030) at offset 1 is not in the vocabulary"),
        ({"text": TEXT, "layer": 2}, "layer: must be in [0, 1], got 2"),
        ({}, "text: Field required, got {}"),
    ],
)
def test_refusals_name_the_field(server, body, message):
    response = ask(server, **body)
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)
    assert response.json()["error"]["param"] == message.partition(":")[0]


def test_its_memory_is_admitted_and_given_back(checkpoint, tmp_path):
    big = save_random(tmp_path / "big", block_size=128, n_head=16, n_kv_head=16, n_embd=64, n_layer=2)
    with serving(big.path, max_held_bytes=40_000_000) as server:
        text = "a" * 128
        response = ask(server, text=text)
        assert response.status_code == 400
        assert "2 layers of 16 heads need 12582912 bytes of memory, 10000000 are allowed" in response.text
        assert len(ask(server, text=text, head=3).json()["data"]) == 2
        server.wait_until_metric("chargpt_held_bytes", 0)


SLOW = """
import time
from pathlib import Path

import service.model.attention as attention

layers, folder = attention.attention_layers, Path({folder!r})

def waiting(weights, config, ids, *logits):
    if logits:  # the check of the model
        return layers(weights, config, ids, *logits)
    with open(folder / "log", "a") as log:
        log.write("begun\\n")
    while not (folder / "go").exists():
        time.sleep(0.01)
    with open(folder / "log", "a") as log:
        log.write("computed\\n")
    return layers(weights, config, ids)

attention.attention_layers = waiting
"""


def test_texts_run_one_by_one_and_too_many_are_refused(checkpoint, tmp_path, monkeypatch):
    """The places of those that ended or left are free. Others are answered meanwhile."""
    (tmp_path / "sitecustomize.py").write_text(SLOW.format(folder=str(tmp_path)))  # run by each process
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")
    asked = post("/v1/attention", {"text": TEXT}, Connection="close")
    with serving(checkpoint.path) as server, contextlib.ExitStack() as stack:

        def wait_for(count):
            server.wait_until_metric("chargpt_http_requests_in_progress", count + 1)  # with /metrics itself

        waiting = [stack.enter_context(sent(server.port, asked)) for _ in range(MAX_ATTENTION_TEXTS)]
        wait_for(MAX_ATTENTION_TEXTS)
        refused = ask(server, text=TEXT)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], refused.headers["Retry-After"]) == (429, "queue_full", "1")
        assert server.metric("chargpt_admission_rejections_total", reason="queue_full") == 1
        left = waiting.pop()
        left.close()
        wait_for(MAX_ATTENTION_TEXTS - 1)
        waiting.append(stack.enter_context(sent(server.port, asked)))
        wait_for(MAX_ATTENTION_TEXTS)
        assert ask(server, text=TEXT).status_code == 429
        assert (tmp_path / "log").read_text() == "begun\n"
        (tmp_path / "go").touch()
        assert all(received(connection).startswith(b"HTTP/1.1 200") for connection in waiting)
        assert (tmp_path / "log").read_text() == "begun\ncomputed\n" * MAX_ATTENTION_TEXTS
        assert ask(server, text=TEXT).status_code == 200


def test_a_time_limit_ends_it(server):
    responses = [ask(server, text=TEXT, timeout_seconds=1e-9) for _ in range(3)]
    assert {response.status_code for response in responses} == {504}
    error = responses[0].json()["error"]
    assert error["code"] == "timeout" and error["message"].endswith(" s, its timeout_seconds")
    wait_until(lambda: ask(server, text=TEXT).status_code == 200)
