"""lm-evaluation-harness's own code against a real server, offline, from the folder that CHARGPT_LM_EVAL names."""

import json
import os
import subprocess
import sys

import pytest

from service.settings import BUNDLED
from tests.helpers import web
from tests.toolbox.needs import lm_eval_path

pytestmark = pytest.mark.needs("lm_eval")

LINES = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n"
PAIRS = [("ROMEO:\nWhat", " is the matter"), ("KING RICHARD", " II:\nNow")]
SCRIPT = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

url, folder, texts, pairs, options = json.loads(sys.argv[1])
model = LocalCompletionsAPI(
    base_url=f"{url}/v1/completions", model="chargpt", tokenizer=folder, tokenizer_backend="huggingface",
    max_length=256, **options,
)

def instances(kind, arguments):
    return [Instance(kind, {}, tuple(each), number) for number, each in enumerate(arguments)]

print(json.dumps({
    "prefix_token_id": model.prefix_token_id,
    "rolling": model.loglikelihood_rolling(instances("loglikelihood_rolling", [[text] for text in texts])),
    "pairs": model.loglikelihood(instances("loglikelihood", pairs)),
    "generated": model.generate_until(instances("generate_until", [
        [context, {"until": ["\\n\\n"], "max_gen_toks": 20, "temperature": 0}] for context, _ in pairs
    ])),
}))
"""


def test_harness_scores_and_generates(bundled):
    """With the checkpoint's folder as tokenizer, and the id of the line break as what precedes a text."""

    def nats(prefix, continuation):
        body = {"prefix": prefix, "continuations": [continuation], "characters": False}
        return web.post(f"{bundled.url}/v1/score", json=body).json()["data"][0]["nats"]

    def greedy(prompt, max_tokens):
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stop": "\n\n"}
        return web.post(f"{bundled.url}/generate", json=body).json()["choices"][0]["text"]

    texts = [LINES, "O", "\n\nROMEO:\n"]
    context, long = PAIRS[0][0], 2 * LINES + "ROMEO:"  # longer than the model's window
    pairs = [*PAIRS, (context, greedy(context, 8)), (long, "\nBy chance")]
    given = [bundled.url, str(BUNDLED), texts, pairs, {"custom_prefix_token_id": 0}]
    environment = os.environ | {"PYTHONPATH": lm_eval_path(), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(given)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["prefix_token_id"] == 0
    assert found["rolling"] == pytest.approx([-nats("\n", text) for text in texts], abs=1e-4)
    assert [value for value, _ in found["pairs"]] == pytest.approx([-nats(*pair) for pair in pairs], abs=1e-4)
    assert [is_greedy for _, is_greedy in found["pairs"]] == [False, False, True, False]
    assert found["generated"] == [greedy(context, 20) for context, _ in pairs]
