"""The model in Python: its answers are those over HTTP, and its engine's thread serves all threads and frees slots."""

import argparse
import doctest
import functools
import gc
import json
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

import service.python as chargpt
from service.engine import native
from service.text.requests import GenerationRequest
from tests.helpers import call, save_random, serving, web
from tests.http.programs import changed
from tests.toolbox.launch import ROOT
from tests.toolbox.replay import make_models
from tests.toolbox.requests import make_requests
from training.commands import sample, score
from training.model import loading

NAMES = ("texts", "records", "rare", "blocks")
OF_SERVER = {"model", "timeout_seconds", "priority", "strict", "stream", "stream_options", "stream_interval"}
TYPOS = {name[:-1] for name in OF_SERVER}  # for which only a server knows what is meant
SETTINGS = {"max_queued_requests": 1_000_000, "log_level": "error"}
AS_PYTHON = changed(
    {"service.http.routes.service.MAX_PROMPTS": 10_000, "service.http.models.model.MAX_REGEX_CHARACTERS": 10_000}
)
BEYOND_LIMITS = {  # of a server; Python has none
    "max_tokens": (20_000, 10**12, 10**30),
    "max_candidates": (20_000, 10**30),
    "max_candidate_characters": (10**8, 10**30),
}
ENDLESS = 100_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    make_models(folder := tmp_path_factory.mktemp("models"))
    return folder


@pytest.fixture(scope="module")
def models(folder):
    loaded = {name: chargpt.load(folder / name, threads=1) for name in NAMES}
    yield loaded
    for model in loaded.values():
        model.close()


@pytest.fixture(scope="module")
def server(folder):
    with serving(",".join(f"{name}={folder / name}" for name in NAMES), AS_PYTHON, **SETTINGS) as server:
        yield server


@pytest.fixture
def records(models):
    return models["records"]


def asked(count):
    """Random (path, model, fields) that Python has too."""
    seed = random.randrange(2**32)
    print("seed of the requests:", seed)
    for request in make_requests(count, seed):
        path = request["path"].replace("/v1/completions", "/generate")
        try:
            body = json.loads(request["body"])
            json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):  # malformed
            continue
        if path not in ("/generate", "/v1/score", "/v1/next") or request["method"] != "POST" or type(body) is not dict:
            continue
        model = request["server"] if body.get("model") not in NAMES else body["model"]
        fields = {name: value for name, value in body.items() if name not in OF_SERVER | TYPOS}
        if all(fields.get(name) not in values for name, values in BEYOND_LIMITS.items()):
            yield path, model, fields


def error_of(message, param, code, fields):
    """An error without what differs: why a field is refused, the prompt that failed first, and limits."""
    if code == "unknown_field" and "did you mean" not in message:
        message = "refused"
    if code == "too_few_matches" and isinstance(fields.get("prompt"), list):
        message = "too few"
    return {"message": re.sub(r"must be in \[1, \d+\]", "must be in …", message), "param": param, "code": code}


def over_http(server, path, model, fields):
    answer = web.post(f"{server.url}{path}", json=fields | {"model": model, "strict": True}).json()
    if "error" in answer:
        return error_of(answer["error"]["message"], answer["error"]["param"], answer["error"]["code"], fields)
    if path != "/generate":
        return answer["data"]
    receipt = answer["chargpt"]
    exact = receipt.get("exact")
    return {
        "choices": [{name: value for name, value in it.items() if name != "exact"} for it in answer["choices"]],
        "replaced": receipt["replaced_characters"],
        "dropped": receipt["dropped_characters"],
        "exact": exact and (exact["candidates"], exact["matches"], exact["characters"]),
    }


def rounded(values):
    return values and [None if value is None else round(value, 7) for value in values]


def in_python(model, path, fields):
    """The same, in the form of HTTP."""
    try:
        if path == "/v1/score":
            return [score_in_form_of_http(it) for it in model.score(**fields)]
        if path == "/v1/next":
            return [
                {
                    "index": it.index,
                    "entropy_nats": it.entropy_nats,
                    "entropy_bits": it.entropy_bits,
                    "distribution": [character._asdict() for character in it.distribution],
                }
                for it in model.next(**fields)
            ]
        found = model.generate(**fields)
    except ValueError as error:
        return error_of(str(error), error.param, error.code, fields)
    check_streamed(model, fields, found)
    return {
        "choices": [choice_in_form_of_http(it) for it in found],
        "replaced": found.replaced_characters,
        "dropped": found.dropped_characters,
        "exact": found.exact,
    }


def choice_in_form_of_http(answer):
    choice = {
        "index": answer.index,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "seed": answer.seed,
    }
    if answer.logprobs is not None:
        tops = [top and {character: round(value, 7) for character, value in top.items()} for top in answer.top_logprobs]
        choice["logprobs"] = {
            "tokens": list(answer.text),
            "token_logprobs": rounded(answer.logprobs),
            "top_logprobs": tops,
            "text_offset": list(range(len(answer.text))),
        }
    return choice


def score_in_form_of_http(score):
    form = {
        "index": score.index,
        "characters": score.characters,
        "nats": score.nats,
        "nats_per_character": score.nats_per_character,
        "bits_per_character": score.bits_per_character,
        "perplexity": score.perplexity,
    }
    optional = {"rank": score.rank, "unknown_characters": score.unknown_characters}
    optional |= {"character_nats": rounded(score.character_nats)}
    return form | {name: value for name, value in optional.items() if value is not None}


def check_streamed(model, fields, found):
    """A stream and a sample have the same texts."""
    prompts = fields.get("prompt", "")
    is_one = isinstance(prompts, str) or not isinstance((prompts or [""])[0], str | list)
    if not is_one or len(found) != fields.get("n", 1):
        return
    plain = {name: value for name, value in fields.items() if name not in ("n", "logprobs")}
    if fields.get("best_of") in (None, len(found)):
        if len(found) == 1 and fields.get("logprobs") is None:
            assert "".join(model.stream(**plain)) == found.text
        if fields.get("suffix") in (None, ""):
            plain = {name: value for name, value in plain.items() if name not in ("best_of", "suffix")}
            assert [it.text for it in model.sample(len(found), **plain)] == found.texts


def test_random_requests_have_the_answers_that_they_have_over_http(server, models):
    requests = list(asked(900))
    with ThreadPoolExecutor(4) as pool:  # all at once, in Python too
        expected = list(pool.map(lambda request: over_http(server, *request), requests))
        found = list(pool.map(lambda request: in_python(models[request[1]], request[0], request[2]), requests))
    assert len(requests) > 300 and sum("choices" in it for it in found) > 100
    for request, one, other in zip(requests, found, expected, strict=True):
        assert one == other, request


FLAGS = {  # of `sample`, with the types that it takes
    "n": int, "max_tokens": int, "seed": int, "temperature": float | int, "top_k": int, "top_p": float | int,
    "min_p": float | int, "typical_p": float | int, "regex": str, "stop_regex": str, "exact": bool, "ignore_eos": bool,
    "max_candidates": int, "unknown_characters": str, "replacement_character": str, "prompt": str, "stop": str | list,
}  # fmt: skip
ESCAPED = {"prompt", "stop", "replacement_character"}


def as_sample(model, fields):
    """The flags of `sample` for a request, or None if it has none."""
    given = {name: value for name, value in fields.items() if value is not None and (name, value) != ("prompt", "")}
    if fields.keys() - GenerationRequest.model_fields.keys():  # a server may refuse their names
        return None
    if given.get("max_tokens") == 0 or (given.get("exact") is True and "regex" not in given):
        return None
    if isinstance(given.get("n"), int) and given["n"] > 10_000:  # which has no limit there
        return None
    is_alike = given.keys() <= FLAGS.keys() and all(type(v) is not bool or FLAGS[k] is bool for k, v in given.items())
    if not is_alike or not all(isinstance(value, FLAGS[name]) for name, value in given.items()) or "seed" not in given:
        return None
    stops = [given["stop"]] if isinstance(given.get("stop"), str) else given.get("stop", [])
    if model != "texts" and model != "rare" and (stops or "stop_regex" in given) and not given.get("ignore_eos"):
        return None  # other stops take the place of a record's end
    if "unknown_characters" in given and given["unknown_characters"] not in ("refuse", "replace", "drop"):
        return None  # argparse has its own words
    flags = []
    for name, value in (given | {"stop": None}).items():
        for item in stops if name == "stop" else [value]:
            if not isinstance(item, str if name == "stop" else FLAGS[name]) or "\0" in str(item):
                return None
            if name in ESCAPED:
                item = item.replace("\\", "\\\\")
            flag = "-n" if name == "n" else f"--{name.replace('_', '-')}"
            if item is not False:
                flags.append(flag if item is True else f"{flag}={item}" if name != "n" else f"-n{item}")
    return [*flags, *([] if "max_tokens" in given else ["--max-tokens=256"]), "--format=jsonl"]


def as_score(model, fields):
    """The lines of `score` for a request and its flags, or None if it has none."""
    texts = [fields["texts"]] if isinstance(fields.get("texts"), str) else fields.get("texts")
    options = {name: fields.get(name) for name in ("unknown_characters", "replacement_character")}
    known = {"texts", "characters", *options}
    if not isinstance(fields.get("characters", True), bool):
        return None
    if fields.keys() - known or model == "blocks" or not texts or not isinstance(texts, list):
        return None
    if not all(isinstance(it, str) and it.isprintable() for it in texts) or options["unknown_characters"] not in (
        None, "refuse", "replace", "drop",
    ):  # fmt: skip
        return None
    flags = [f"--unknown-characters={options['unknown_characters'] or 'refuse'}"]
    if (replacement := options["replacement_character"]) is not None:
        if not isinstance(replacement, str):
            return None
        escaped = replacement.replace("\\", "\\\\")
        flags.append(f"--replacement-character={escaped}")
    return "".join(f"{text}\n" for text in texts), flags


def in_words(message):
    """An error without the field that it begins with. Other fields are flags for commands, and their numbers floats."""
    words = re.sub(r"\.0\b", "", message.partition(": ")[2].replace("--", "").replace("-", "_"))
    return re.sub(r"\b\d{17,}\b", lambda number: str(float(number[0])), words)


def test_random_requests_have_the_answers_that_commands_print(server, folder, tmp_path, capsys, monkeypatch):
    options = {"device": "cpu", "threads": 1}
    loaded = functools.cache(lambda path: loading.load_model(argparse.Namespace(checkpoint=path, **options)))
    for module in (sample, score):
        monkeypatch.setattr(module, "load_model", lambda args: loaded(args.checkpoint))
    requests, counts = list(asked(4000)), Counter()
    capsys.readouterr()
    for path, model, fields in requests:
        flags = as_sample(model, fields) if path == "/generate" else None
        if flags is not None and counts["sample"] + counts["sample refused"] < 90:
            command = ["sample", "--checkpoint", folder / model, *flags]
        elif path == "/v1/score" and (found := as_score(model, fields)) and counts["score"] < 20:
            (tmp_path / "lines.txt").write_text(found[0], encoding="utf-8")
            command = ["score", "--checkpoint", folder / model, "--data", tmp_path / "lines.txt", *found[1]]
        else:
            continue
        expected = over_http(server, path, model, fields)
        status = call(command)
        output, error = capsys.readouterr()
        rows = [json.loads(line) for line in output.splitlines() if line]
        if command[0] == "score":
            counts["score"] += 1
            if isinstance(expected, list):
                assert status == 0, (command, error)
                names = ("characters", "nats", "perplexity")
                assert [[it[name] for name in names] for it in rows] == [
                    [it[name] for name in names] for it in expected
                ]
            else:
                assert status == 1, (command, fields, expected)
        elif "choices" in expected:
            counts["sample"] += 1
            assert status == 0, (command, error)
            texts = [(it["text"], it["seed"]) for it in expected["choices"]]
            assert [it["seed"] for it in rows] == [seed for _, seed in texts], command
            assert all(it["text"].endswith(text) for it, (text, _) in zip(rows, texts, strict=True)), command
            given = {it["text"].removesuffix(text) for it, (text, _) in zip(rows, texts, strict=True)}
            assert fields.get("unknown_characters") or given == {fields.get("prompt") or ""}, command
        else:
            counts["sample refused"] += 1
            assert status == 1, (command, expected)
            if expected["code"] != "too_few_matches" and error.startswith("error: --" + (expected["param"] or "?")):
                assert in_words(error.strip().removeprefix("error: ")) == in_words(expected["message"])
    print(counts)
    assert counts["sample"] > 40 and counts["score"] > 5


def test_a_call_with_many_sequences_and_calls_of_many_threads_have_the_same_texts(models):
    model = models["texts"]
    every = model.generate(["ROMEO:", "To be"], n=40, max_tokens=50, seed=7)
    assert [answer.seed for answer in every] == [*range(7, 47), *range(7, 47)]

    def alone(i):
        return model.generate(("ROMEO:", "To be")[i // 40], max_tokens=50, seed=7 + i % 40).text

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(alone, range(80))) == every.texts


def test_a_sample_is_in_order_however_long_its_texts_are(records):
    """More than fit into the window."""
    found = list(records.sample(1000, seed=5, max_tokens=80))
    assert [answer.index for answer in found] == list(range(1000))
    assert [answer.text for answer in found] == records.generate(n=1000, seed=5, max_tokens=80).texts
    assert len({len(answer.text) for answer in found}) > 10


def test_what_is_left_behind_frees_its_slots(folder):
    """With one slot, nothing else could run otherwise."""
    with chargpt.load(folder / "texts", threads=1, slots=1) as model:
        for begin in (lambda: model.stream("ROMEO:", max_tokens=ENDLESS), lambda: model.sample(1000, max_tokens=500)):
            assert next(begin())
            gc.collect()
        assert len(model.generate("ROMEO:", max_tokens=20).text) == 20


def test_an_interrupted_call_leaves_the_model_usable(folder):
    code = """
import signal, sys, threading
import service.python as chargpt
model = chargpt.load(sys.argv[1], threads=1, slots=2)
other = model.stream("ROMEO:", max_tokens=100_000_000)
def interrupt():
    for _ in range(20):
        next(other)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    model.generate("ROMEO:", max_tokens=100_000_000)
except KeyboardInterrupt:
    other.close()
    print(len(model.generate("ROMEO:", n=2, max_tokens=5)))
"""
    assert script(code, folder / "texts") == "2\n"


def script(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def test_a_fork_is_refused_and_may_load_its_own(folder):
    code = """
import os, sys, warnings
import service.python as chargpt
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
model = chargpt.load(sys.argv[1], threads=1)
if not os.fork():
    try:
        model.generate("a")
    except chargpt.ModelClosedError as error:
        print(error)
    print(len(chargpt.load(sys.argv[1], threads=1).generate("ROMEO:", max_tokens=7).text), flush=True)
    sys.exit()  # with its finalizers
os.wait()
print(len(model.generate("ROMEO:", max_tokens=9).text))
"""
    refusal, of_child, of_parent = script(code, folder / "texts").splitlines()
    assert "in this fork of it: load the model in each process" in refusal
    assert (of_child, of_parent) == ("7", "9")


@pytest.mark.skipif(native.why_not() is not None, reason="native does not run here")
def test_no_torch_and_nothing_of_the_server_is_imported(folder):
    code = """
import sys
import service.python as chargpt
model = chargpt.load(sys.argv[1])
model.generate("ROMEO:", max_tokens=5, regex="[a-z ]+")
model.score("To be")
print(*{name.partition(".")[0] for name in sys.modules})
"""
    heavy = {"torch", "litserve", "pydantic_settings", "prometheus_client", "training"}
    assert not heavy & {*script(code, folder / "texts").split()}


def test_without_the_native_library_a_warning_names_torch_and_the_reason(folder, models, tmp_path, monkeypatch):
    monkeypatch.setenv("CHARGPT_NATIVE_LIBRARY", str(tmp_path / "none.so"))
    native.library.cache_clear()
    try:
        with pytest.warns(UserWarning, match="running on backend torch, because native is not available: .*none.so"):
            model = chargpt.load(folder / "records", threads=1, slots=2)
        with model:
            assert (model.backend, model.dtype) == ("torch", "float64")
            assert model.generate("Al", seed=1, temperature=0).text
    finally:
        monkeypatch.undo()
        native.library.cache_clear()


def test_a_closed_model_says_so_and_wakes_who_waits(folder):
    model = chargpt.load(folder / "texts", threads=1)
    stream = model.stream("ROMEO:", max_tokens=ENDLESS)
    next(stream)
    threading.Thread(target=model.close).start()
    with pytest.raises(chargpt.ModelClosedError, match="^the model is closed$"):
        for _ in stream:
            pass
    with pytest.raises(chargpt.ModelClosedError):
        model.generate("a")
    assert repr(model).endswith(", closed>")
    model.close()


def test_one_result_has_its_attributes_on_the_list(models):
    model = models["texts"]
    one, two = model.generate("ROMEO:", max_tokens=5, seed=1), model.generate(["a", "b"], max_tokens=5)
    assert (one.text, one.seed, str(one[0])) == (one[0].text, 1, one.text)
    with pytest.raises(AttributeError, match=r"there are 2 results: take one, as in results\[0\].text"):
        _ = two.text
    assert model.score("To be").nats == model.score(["To be", "or not"])[0].nats
    found = model.next("To b", top=3)
    assert len(found.distribution) == 3 and found[0]["e"] == found.distribution[0].probability > 0.5
    assert found[0]["Z"] == 0.0 < model.next("To b")[0]["Z"]


def test_results_are_shown_as_tables(models):
    model = models["texts"]
    shown = repr(model.generate("ROMEO:", n=30, max_tokens=100, seed=1)).splitlines()
    assert shown[0].split() == ["seed", "finish_reason", "text"] and shown[-1] == "… 10 more" and len(shown) == 22
    assert repr(model.score(prefix="To b", continuations=["e", "x"])).splitlines()[1].split()[-1] == "'e'"
    assert "'e' 0." in repr(model.next("To b"))
    assert "texts: 1,106,176 parameters, 65 characters, backend" in repr(model)


@pytest.mark.parametrize(
    "method, fields, message",
    [
        ("generate", {"temprature": 1}, "temprature: unknown field; did you mean temperature?"),
        ("generate", {"foo": 1}, "foo: unknown field; known fields are "),
        ("stream", {"n": 2}, "n: a stream has one answer, got 2; use generate"),
        ("stream", {"prompt": ["a", "b"]}, "prompt: a stream has one answer, got 2; use generate"),
        ("stream", {"best_of": 2}, "best_of: cannot be streamed if greater than n (1), got 2"),
        ("stream", {"logprobs": 2}, "logprobs: a stream yields text alone; use generate"),
        ("sample", {"count": 3, "n": 2}, "n: a sample has none, as its count says how many answers there are"),
        ("sample", {"count": 2.5}, "count: must be an integer of at least 0, got 2.5"),
        ("sample", {"count": 2, "prompt": ["a", "b"]}, "prompt: a sample has one prompt, got 2; use generate"),
        ("next", {"top": "a"}, "top: must be an integer of at least 0, got 'a'"),
    ],
)
def test_an_error_comes_at_once_with_the_argument(models, method, fields, message):
    with pytest.raises(chargpt.RequestError) as raised:
        getattr(models["texts"], method)(**fields)
    assert str(raised.value).startswith(message)
    assert raised.value.param == message.partition(":")[0]


def test_columns_of_numpy_are_lists(models):
    import numpy as np

    model = models["texts"]
    found = model.generate(np.array(["a", "b"]), seed=np.int64(3), max_tokens=np.int32(4))
    assert found.texts == model.generate(("a", "b"), seed=3, max_tokens=4).texts


def test_a_runs_folder_gives_its_best_checkpoint(tmp_path):
    save_random(tmp_path / "run" / "best")
    with chargpt.load(tmp_path / "run", threads=1) as model:
        assert model.checkpoint.path == tmp_path / "run" / "best"
    with pytest.raises(chargpt.CheckpointError, match="no checkpoint at .*none"):
        chargpt.load(tmp_path / "none")
    with pytest.raises(ValueError, match=r"slots must be in \[1, 4096\], got 0"):
        chargpt.load(tmp_path / "run", slots=0)


def test_every_example_of_the_documents_runs(folder, tmp_path, monkeypatch):
    """In one session. Outputs are those of native, as in the README; … stands for anything."""
    monkeypatch.setitem(sys.modules, "chargpt", chargpt)  # installed, it has that name
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints" / "names").mkdir(parents=True)
    (tmp_path / "checkpoints" / "names" / "best").symlink_to(folder / "records")
    (tmp_path / "names.txt").write_text("Al\nBo\n")
    documents = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "service/PYTHON.md")]
    blocks = re.findall(r"^```pycon\n(.*?)^```$", "\n".join(documents), re.DOTALL | re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest("\n".join(blocks).replace("…", "..."), {}, "documents", None, 0)
    assert len(examples.examples) > 25
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert not runner.run(examples, out=report.append, clear_globs=False).failed, "".join(report)
    examples.globs["model"].close()
    examples.globs["names"].close()
