"""A model with an unknown symbol over HTTP: what replaces unknown characters, what is sampled, what is scored."""

import pytest
import torch

from service.catalog import Catalog
from service.model.checkpoint import Checkpoint
from service.model.tokenizer import NEVER, UNKNOWN, CharTokenizer
from tests.helpers import VOCABULARY, exact, lasting, random_model, web
from training.run.saving import save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Which finds the symbol likely everywhere."""
    folder = tmp_path_factory.mktemp("unknown") / "ck"
    tokenizer = CharTokenizer(sorted([*VOCABULARY, UNKNOWN]), has_unknown=True)
    model = random_model(vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        model.head.weight[tokenizer.unknown_id] *= 3
    save_checkpoint(folder, model, tokenizer, {"losses": {}})
    return Checkpoint.read(folder)


@pytest.fixture(scope="module")
def server(checkpoint):
    yield from lasting(checkpoint.path, dtype="float64", unknown_characters="replace")


@pytest.fixture(scope="module")
def post(server):
    def post(path, **body):
        response = web.post(server.url + path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    return post


def test_unknown_characters_become_the_symbol_unless_another_is_chosen(post, server, checkpoint):
    encode = checkpoint.tokenizer.encode
    answer = post("/tokenize", prompt="a漢b é")
    assert (answer["tokens"], answer["replaced_characters"]) == (encode(f"a{UNKNOWN}b {UNKNOWN}"), 2)
    assert post("/detokenize", tokens=answer["tokens"]) == {"prompt": f"a{UNKNOWN}b {UNKNOWN}"}
    assert post("/tokenize", prompt="a漢b", replacement_character=" ")["tokens"] == encode("a b")
    assert post("/tokenize", prompt=f"a{UNKNOWN}")["replaced_characters"] == 0
    refused = web.post(f"{server.url}/tokenize", json={"prompt": "漢", "unknown_characters": "refuse"})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "unknown_character"
    assert web.get(f"{server.url}/tokenizer_info").json()["unk_token"] == UNKNOWN
    assert UNKNOWN in web.get(f"{server.url}/info").json()["model"]["vocabulary"]


def test_it_is_sampled_only_where_a_request_allows_it(post, checkpoint):
    def texts(**body):
        choices = post("/generate", prompt="The ", max_tokens=60, n=10, seed=5, **body)["choices"]
        return [choice["text"] for choice in choices]

    unknown, e = checkpoint.tokenizer.unknown_id, checkpoint.tokenizer.encode("e")[0]
    found = texts()
    assert UNKNOWN not in "".join(found)
    for i in (0, 9):  # a definite distribution, that of the reference with this bias
        assert found[i] == exact(checkpoint, "The ", 60, seed=5 + i, logit_bias=((unknown, NEVER),))
    biased = texts(logit_bias={"e": 3.0})
    assert biased[0] == exact(checkpoint, "The ", 60, seed=5, logit_bias=((e, 3.0), (unknown, NEVER)))
    for key in (UNKNOWN, str(unknown)):
        allowed = texts(logit_bias={key: 0.0})
        assert UNKNOWN in allowed[0] and allowed[0] == exact(checkpoint, "The ", 60, seed=5)
    assert UNKNOWN not in "".join(texts(temperature=0.0) + texts(regex="[^a-y]{50}"))
    assert texts(regex=f"{UNKNOWN}{{3}}") == [UNKNOWN * 3] * 10  # where nothing else matches


def test_scores_are_the_models_own(post, checkpoint):
    text = f"The {UNKNOWN}at"
    ids = checkpoint.tokenizer.encode(text)
    logits = checkpoint.load_model(dtype=torch.float64)(torch.tensor([ids]))[0, :-1]
    nats = -logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
    plain, replaced = post("/v1/score", texts=[text, "The 漢at"])["data"]
    assert plain["nats"] == replaced["nats"] == pytest.approx(float(nats.sum()), abs=0.01)
    [row] = post("/v1/next", prompt="The ")["data"]
    listed = {it["character"]: it["logprob"] for it in row["distribution"]}
    assert listed[UNKNOWN] == pytest.approx(-float(nats[3]), abs=0.01) and listed[UNKNOWN] > -5
    choice = post("/v1/completions", prompt="The ", max_tokens=1, seed=1, logprobs=50)["choices"][0]
    assert choice["logprobs"]["top_logprobs"][0][UNKNOWN] == pytest.approx(listed[UNKNOWN], abs=0.01)


def test_each_score_says_how_many_characters_are_unknown(post):
    def counts(**body):
        return [row["unknown_characters"] for row in post("/v1/score", **body)["data"]]

    texts = ["The cat", "The 漢at é", f"a{UNKNOWN}b漢", "é"]
    assert counts(texts=texts) == counts(texts=texts, unknown_characters="drop") == [0, 2, 2, 1]
    assert counts(texts=texts, replacement_character="x") == [0, 2, 2, 1]
    assert counts(prefix="漢", continuations=["é", "a"]) == [1, 0]  # of its own
    assert counts(texts=[f"a{UNKNOWN}"], unknown_characters="refuse") == [1]


def test_the_setting_replace_needs_no_space_where_there_is_a_symbol(checkpoint, tmp_path):
    tokenizer = CharTokenizer(["\n", "a", UNKNOWN], has_unknown=True)
    save_checkpoint(tmp_path / "ck", random_model(vocab_size=3), tokenizer, {"losses": {}})
    (tmp_path / "run").mkdir()
    catalog = Catalog([(None, tmp_path / "ck")], "chargpt", tmp_path / "run", "")
    catalog.open()
    assert list(catalog.served) == ["chargpt"]
