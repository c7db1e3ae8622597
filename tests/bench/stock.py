"""The alternative that a user would build: a stock LitServe service, following its documentation.

    python -m tests.bench.stock --checkpoint DIR --port 8000       batched streaming with transformers
    python -m tests.bench.stock --stub --port 8000                 no model, to measure the path alone

POST /generate takes {"prompt", "max_tokens"} and streams one JSON object per character, {"text": …}. --stub adds
POST /whole, which returns one character. A batch collects requests for `--batch-timeout` seconds and runs until its
longest completion is done.
"""

from __future__ import annotations

import argparse
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litserve

MAX_BATCH = 64


class GenerateAPI(litserve.LitAPI):
    """A transformers model behind LitServe's batched streaming."""

    def __init__(self, checkpoint: Path, threads: int, **options: Any):
        super().__init__(**options)
        self.checkpoint, self.threads = checkpoint, threads

    def setup(self, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if self.threads:
            torch.set_num_threads(self.threads)
        self.tokenizer = AutoTokenizer.from_pretrained(self.checkpoint, padding_side="left", pad_token="\n")
        self.model = AutoModelForCausalLM.from_pretrained(self.checkpoint).to(device).eval()

    def decode_request(self, request):  # an annotation would become the schema of the body
        return request["prompt"], request["max_tokens"]

    def batch(self, inputs: list[tuple[str, int]]) -> list[tuple[str, int]]:
        return inputs

    def predict(self, batch: list[tuple[str, int]]) -> Iterator[list[str]]:
        prompts, lengths = zip(*batch, strict=True)
        inputs = self.tokenizer(list(prompts), return_tensors="pt", padding=True).to(self.model.device)
        steps = BatchStreamer()

        def generate() -> None:
            try:
                self.model.generate(
                    **inputs, max_new_tokens=max(lengths), do_sample=True,
                    temperature=0.8, top_k=40, top_p=0.95, streamer=steps,
                )  # fmt: skip
            finally:
                steps.end()

        threading.Thread(target=generate).start()
        for number, ids in enumerate(steps):
            characters = [self.tokenizer.decode(id) for id in ids]
            yield [c if number < length else "" for c, length in zip(characters, lengths, strict=True)]

    def encode_response(self, outputs: Iterator[list[str]]) -> Iterator[list[dict[str, str]]]:
        for texts in outputs:
            yield [{"text": text} for text in texts]


class BatchStreamer:
    """Yields the ids of each step of a batch; transformers' own streamers support one text only."""

    def __init__(self) -> None:
        self._steps: queue.Queue[list[int] | None] = queue.Queue()
        self._is_prompt = True

    def put(self, ids: Any) -> None:
        if self._is_prompt:  # the first call
            self._is_prompt = False
        else:
            self._steps.put(ids.tolist())

    def end(self) -> None:
        self._steps.put(None)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._steps.get, None)


class StubStream(litserve.LitAPI):
    """Streams characters without a model."""

    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request):  # an annotation would become the schema of the body
        return request["max_tokens"]

    def batch(self, inputs: list[int]) -> list[int]:
        return inputs

    def predict(self, lengths: list[int]) -> Iterator[list[str]]:
        for number in range(max(lengths)):
            yield ["a" if number < length else "" for length in lengths]

    def encode_response(self, outputs: Iterator[list[str]]) -> Iterator[list[dict[str, str]]]:
        for texts in outputs:
            yield [{"text": text} for text in texts]


class StubWhole(litserve.LitAPI):
    """Returns one character without a model."""

    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request):  # an annotation would become the schema of the body
        return request["prompt"]

    def predict(self, prompt: str) -> str:
        return "a"

    def encode_response(self, output: str) -> dict[str, str]:
        return {"text": output}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--stub", action="store_true")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's default")
    parser.add_argument("--batch-timeout", type=float, default=0.05, help="seconds (default: %(default)s)")
    args = parser.parse_args()
    if args.stub == (args.checkpoint is not None):
        parser.error("pass either --checkpoint or --stub")
    streaming = {"stream": True, "max_batch_size": MAX_BATCH, "batch_timeout": args.batch_timeout}
    if args.stub:
        apis = [StubStream(api_path="/generate", **streaming), StubWhole(api_path="/whole")]
    else:
        apis = [GenerateAPI(args.checkpoint, args.threads, api_path="/generate", **streaming)]
    server = litserve.LitServer(apis, accelerator="auto", timeout=False)
    server.run(host="127.0.0.1", port=args.port, generate_client_file=False, log_level="warning")


if __name__ == "__main__":
    main()
