"""Exported files against the model, through onnxruntime, gguf's reader and llama.cpp."""

import contextlib

import numpy as np
import pytest
import torch

from service.model.checkpoint import Checkpoint
from service.model.params import SamplingParams
from service.model.tokenizer import UNKNOWN, CharTokenizer
from tests.helpers import VOCABULARY, random_model, save_random
from training.commands.export import export
from training.run.saving import save_checkpoint


def ids(rows, length):
    return torch.randint(len(VOCABULARY), (rows, length), generator=torch.Generator().manual_seed(0))


def with_unknown(folder):
    tokenizer = CharTokenizer(sorted([*VOCABULARY, UNKNOWN, "😀"]), has_unknown=True)
    save_checkpoint(folder, random_model(vocab_size=tokenizer.vocab_size), tokenizer, {"losses": {}})
    return Checkpoint.read(folder)


def test_onnxruntime_gives_the_same_logits(tmp_path):
    import onnxruntime

    checkpoint = with_unknown(tmp_path / "ck")
    export(checkpoint, "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    model = checkpoint.load_model()
    for rows, length in ((1, 1), (1, 5), (1, 41), (2, 7), (2, 8), (2, 9), (3, 40)):  # around and past the window of 8
        idx = ids(rows, length)
        (logits,) = session.run(["logits"], {"idx": idx.numpy()})
        np.testing.assert_allclose(logits, model(idx), rtol=0, atol=1e-3)
    metadata = session.get_modelmeta().custom_metadata_map
    assert (metadata["vocabulary"], metadata["unknown"]) == ("".join(checkpoint.tokenizer.characters), UNKNOWN)


def test_gguf_has_the_same_tensors_and_vocabulary(checkpoint, tmp_path):
    from gguf import GGUFReader

    export(checkpoint, "gguf", tmp_path / "model.gguf")
    reader = GGUFReader(tmp_path / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen3"
    assert fields["qwen3.context_length"] == checkpoint.config.block_size
    tokens = [bytes.fromhex(token.replace("\\x", "")).decode() for token in fields["tokenizer.ggml.tokens"]]
    assert tokens == VOCABULARY
    assert "tokenizer.ggml.unknown_token_id" not in fields and {*fields["tokenizer.ggml.token_type"]} == {1}
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    state = checkpoint.load_model().state_dict()
    expected = torch.cat([state[f"blocks.{i}.attn.qkv.weight"].flatten() for i in range(2)])
    found = [tensors[f"blk.{i}.attn_{part}.weight"].flatten() for i in range(2) for part in "qkv"]
    np.testing.assert_array_equal(np.concatenate(found), expected.numpy())
    assert sum(tensor.size for tensor in tensors.values()) == sum(value.numel() for value in state.values())


@pytest.mark.parametrize(("records", "end"), [(True, "\n"), ("blank", "\x1e")])
def test_exports_name_the_end_of_records(tmp_path, records, end):
    from gguf import GGUFReader

    about = {"recipe": {"records": records}, "data": {"record_end": end}}
    checkpoint = save_random(tmp_path / "ck", [*VOCABULARY, "\x1e"], about)
    export(checkpoint, "gguf", tmp_path / "model.gguf")
    fields = {name: field.contents() for name, field in GGUFReader(tmp_path / "model.gguf").fields.items()}
    for name in ("bos", "eos"):
        assert checkpoint.tokenizer.decode([fields[f"tokenizer.ggml.{name}_token_id"]]) == end
    assert fields["tokenizer.ggml.add_bos_token"] and not fields["tokenizer.ggml.add_eos_token"]


def load_gguf(file):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama_cpp is not installed; make test-slow builds it")
    f32 = llama_cpp.GGML_TYPE_F32
    options = {"n_ctx": 512, "n_threads": 1, "logits_all": True, "type_k": f32, "type_v": f32, "verbose": False}
    return contextlib.closing(llama_cpp.Llama(str(file), **options))


def test_gguf_names_the_unknown_symbol(tmp_path):
    from gguf import GGUFReader, TokenType

    checkpoint = with_unknown(tmp_path / "ck")
    tokenizer = checkpoint.tokenizer
    export(checkpoint, "gguf", tmp_path / "model.gguf")
    fields = {name: it.contents() for name, it in GGUFReader(tmp_path / "model.gguf").fields.items()}
    unknown = tokenizer.unknown_id
    assert fields["tokenizer.ggml.unknown_token_id"] == unknown == tokenizer.vocab_size - 2
    assert fields["tokenizer.ggml.tokens"][unknown] == "\\xef\\xbf\\xbd"
    types = fields["tokenizer.ggml.token_type"]
    assert [id for id, kind in enumerate(types) if kind != TokenType.NORMAL] == [unknown]
    assert types[unknown] == TokenType.UNKNOWN


@pytest.mark.slow
def test_llama_cpp_gives_the_same_logits_and_text(tmp_path):
    W = 256
    checkpoint = save_random(tmp_path / "ck", block_size=W, n_embd=64)
    export(checkpoint, "gguf", tmp_path / "model.gguf")
    model, unbounded = checkpoint.load_model(), random_model(block_size=512, n_embd=64)
    idx = ids(1, 400)
    prompt = "Hello, World! "
    with load_gguf(tmp_path / "model.gguf") as llama:
        llama.eval(idx[0].tolist())
        logits = np.array(llama.scores[:400])
        completion = llama.create_completion(prompt, max_tokens=W - len(prompt), temperature=0)
    np.testing.assert_allclose(logits[:W], model(idx)[0, :W], rtol=0, atol=1e-3)
    # llama.cpp ignores the window, which is why the file states block_size as its context length.
    np.testing.assert_allclose(logits, unbounded(idx)[0], rtol=0, atol=1e-3)
    [choice] = completion["choices"]
    expected = model.generate(checkpoint.tokenizer.encode(prompt), W - len(prompt), SamplingParams(temperature=0))
    assert (choice["text"], choice["finish_reason"]) == (checkpoint.tokenizer.decode(expected), "length")


@pytest.mark.slow
@pytest.mark.parametrize("line_breaks", [True, False])
def test_llama_cpp_reads_and_writes_every_character(tmp_path, line_breaks):
    """No character ends a text, spaces are preserved, and unknown characters are refused."""
    characters = sorted({*"ab! \t\r'\"\\<x0>", "\0", "é", "€", "漢", "😀", "\u0301", "\u2581", *("\n" * line_breaks)})
    checkpoint = save_random(tmp_path / "ck", characters)
    export(checkpoint, "gguf", tmp_path / "model.gguf")
    text = "".join(characters) + "  a  <0x00> \\x00 é\u0301 \u2581 b "
    with load_gguf(tmp_path / "model.gguf") as llama:
        tokens = llama.tokenize(text.encode(), add_bos=False)
        assert tokens == checkpoint.tokenizer.encode(text)
        assert llama.detokenize(tokens) == b"".join(llama.detokenize([token]) for token in tokens) == text.encode()
        assert llama.token_bos() == llama.token_eos() == -1
        with pytest.raises(RuntimeError, match="llama_decode"):
            llama.create_completion("aZb", max_tokens=1)


@pytest.mark.slow
def test_llama_cpp_ends_a_record_by_itself(tmp_path):
    """Its beginning-of-sequence token goes before a prompt, and a text ends at the line break, as at the service."""
    checkpoint = save_random(tmp_path / "ck", about={"recipe": {"records": True}}, block_size=256)
    export(checkpoint, "gguf", tmp_path / "model.gguf")
    model, tokenizer, end = checkpoint.load_model(), checkpoint.tokenizer, checkpoint.record_end
    with load_gguf(tmp_path / "model.gguf") as llama:
        assert llama.token_bos() == llama.token_eos() == end
        ended = set()
        for prompt in ("The", "A", "so", "Hello", "x", "Z", "w", "qu", "N", "I"):
            [choice] = llama.create_completion(prompt, max_tokens=100, temperature=0)["choices"]
            ids = model.generate([end, *tokenizer.encode(prompt)], 100, SamplingParams(temperature=0))
            has_ended = end in ids
            expected = ids[: ids.index(end)] if has_ended else ids
            assert choice["text"] == tokenizer.decode(expected)
            assert choice["finish_reason"] == ("stop" if has_ended else "length")
            ended.add(has_ended)
    assert True in ended, "a random model that never ends shows nothing"
