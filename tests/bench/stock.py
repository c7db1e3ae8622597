"""The alternative that a user would build: a stock LitServe service on transformers, following its documentation.

    python -m tests.bench.stock --checkpoint DIR --port 8000 --loop whole        a batch runs to its end
    python -m tests.bench.stock --checkpoint DIR --port 8000 --loop stream       the same, streamed
    python -m tests.bench.stock --stub --port 8000                 no model, to measure the path alone

POST /generate takes {"prompt", "max_tokens"} and returns {"text": …}: one JSON object, or with --loop stream one per
character. --stub adds POST /whole, which returns one character. A batch takes what
waits and runs until its longest completion is done.
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
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0}


class API(litserve.LitAPI):
    """Of (prompt, max_tokens)."""

    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request):  # an annotation would become the schema of the body
        return request["prompt"], request["max_tokens"]

    def batch(self, inputs: list[tuple[str, int]]) -> list[tuple[str, int]]:
        return inputs

    def encode_response(self, output: str) -> dict[str, str]:
        return {"text": output}


class Streaming(API):
    def encode_response(self, outputs: Iterator[list[str]]) -> Iterator[list[dict[str, str]]]:
        for texts in outputs:
            yield [{"text": text} for text in texts]


class TransformersAPI(API):
    def __init__(self, checkpoint: Path, dtype: str, threads: int, **options: Any):
        super().__init__(**options)
        self.checkpoint, self.dtype, self.threads = checkpoint, dtype, threads

    def setup(self, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if self.threads:
            torch.set_num_threads(self.threads)
        dtype = getattr(torch, self.dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(self.checkpoint, padding_side="left", pad_token="\n")
        self.model = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=dtype).to(device).eval()

    def generate(self, prompts: tuple[str, ...], max_tokens: int, **options: Any) -> Any:
        """The ids of left-padded prompts and answers."""
        inputs = self.tokenizer(list(prompts), return_tensors="pt", padding=True).to(self.model.device)
        return self.model.generate(**inputs, max_new_tokens=max_tokens, **SAMPLING, **options)


class WholeAPI(TransformersAPI):
    def predict(self, batch: list[tuple[str, int]]) -> list[str]:
        prompts, lengths = zip(*batch, strict=True)
        ids = self.generate(prompts, max(lengths))[:, -max(lengths) :]
        return ["".join(self.tokenizer.decode(row[:n])) for row, n in zip(ids, lengths, strict=True)]


class StreamAPI(Streaming, TransformersAPI):
    def predict(self, batch: list[tuple[str, int]]) -> Iterator[list[str]]:
        prompts, lengths = zip(*batch, strict=True)
        steps = BatchStreamer()

        def generate() -> None:
            try:
                self.generate(prompts, max(lengths), streamer=steps)
            finally:
                steps.end()

        threading.Thread(target=generate).start()
        for number, ids in enumerate(steps):
            characters = [self.tokenizer.decode(id) for id in ids]
            yield [c if number < length else "" for c, length in zip(characters, lengths, strict=True)]


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


class Stub(Streaming):
    """Streams characters without a model."""

    def predict(self, batch: list[tuple[str, int]]) -> Iterator[list[str]]:
        for number in range(max(length for _, length in batch)):
            yield ["a" if number < length else "" for _, length in batch]


class StubWhole(API):
    """Returns one character without a model."""

    def predict(self, request: tuple[str, int]) -> str:
        return "a"


LOOPS = {"whole": WholeAPI, "stream": StreamAPI}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--stub", action="store_true")
    parser.add_argument("--loop", choices=LOOPS, default="stream", help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's default")
    args = parser.parse_args()
    if args.stub == (args.checkpoint is not None):
        parser.error("pass either --checkpoint or --stub")
    batches = {"max_batch_size": MAX_BATCH}
    if args.stub:
        apis = [Stub(api_path="/generate", stream=True, **batches), StubWhole(api_path="/whole")]
    else:
        api, stream = LOOPS[args.loop], args.loop == "stream"
        apis = [api(args.checkpoint, args.dtype, args.threads, api_path="/generate", stream=stream, **batches)]
    import torch

    accelerator = "cuda" if torch.cuda.is_available() else "cpu"  # "auto" takes the CPU unless torch is imported
    server = litserve.LitServer(apis, accelerator=accelerator, timeout=False)
    server.run(
        host="127.0.0.1", port=args.port, generate_client_file=False, log_level="info" if args.stub else "warning"
    )


if __name__ == "__main__":
    main()
