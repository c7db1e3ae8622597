"""From a text file to text over HTTP, with the real programs and the openai SDK."""

import concurrent.futures
import random
import signal
import subprocess
import sys
from pydoc_data.topics import topics

import pytest
import torch

from service.model.checkpoint import Checkpoint
from service.model.params import SamplingParams
from tests.helpers import CORPUS, PATIENCE, serving


def test_trained_checkpoint_is_served_exactly(tmp_path):
    import openai

    text = (CORPUS.read_text(encoding="utf-8") if CORPUS.exists() else "\n".join(topics.values()))[:60_000]
    (tmp_path / "corpus.txt").write_text(text, encoding="utf-8", newline="")
    command = [sys.executable, "-m", "training", "train", "--preset", "quick", "--steps", "10", "--threads", "1"]
    command += ["--n-layer", "2", "--n-embd", "64", "--block-size", "32"]
    command += ["--eval-every", "10", "--data", tmp_path / "corpus.txt", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    checkpoint = Checkpoint.read(tmp_path / "out" / "best")
    exact = checkpoint.load_model(dtype=torch.float64)

    r, requests = random.Random(0), []
    for i in range(12):
        start, length = r.randrange(len(text) - 400), r.choice([1, 5, 20, 64, 65, 300])
        options = {"temperature": r.choice([0, 0.7, 1.0]), "top_p": r.choice([1.0, 0.95]), "seed": r.randrange(2**63)}
        options |= {"model": "chargpt", "prompt": text[start : start + length], "max_tokens": r.randint(1, 20)}
        requests.append(options | {"stream": i % 2 == 0})

    with serving(tmp_path / "out" / "best", ("-m", "service.command", "serve")) as server:
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
            concurrent.futures.ThreadPoolExecutor(12) as pool,
        ):

            def ask(request):
                answer = client.completions.create(**request)
                if request["stream"]:
                    return "".join(chunk.choices[0].text for chunk in answer)
                assert answer.choices[0].finish_reason == "length"
                return answer.choices[0].text

            texts = list(pool.map(ask, requests))
            with pytest.raises(openai.NotFoundError) as raised:
                client.completions.create(model="gpt-4", prompt="A", stream=True)
            assert (raised.value.param, raised.value.code) == ("model", "model_not_found") and raised.value.request_id

        for request, answer in zip(requests, texts, strict=True):
            params = SamplingParams(request["temperature"], top_p=request["top_p"], seed=request["seed"])
            prompt = checkpoint.tokenizer.encode(request["prompt"])
            expected = exact.generate(prompt, request["max_tokens"], params)
            assert answer == checkpoint.tokenizer.decode(expected)

        assert server.metric("chargpt_request_success_total", finished_reason="length") == 12
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE) == 0, server.output()
