import numpy as np
import pytest
import torch
from helpers import VOCABULARY, random_model, save_random

from service.model.checkpoint import Checkpoint, save_checkpoint
from service.model.tokenizer import CharTokenizer
from training.config import ConfigError
from training.export import export


def ids(rows, length):
    return torch.randint(len(VOCABULARY), (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_onnxruntime_gives_the_same_logits(tmp_path):
    import onnxruntime

    checkpoint = save_random(tmp_path / "ck")
    export(checkpoint, "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    model = checkpoint.load_model()
    for rows, length in ((1, 1), (2, 7), (3, 40)):  # shorter than the band and five bands long
        idx = ids(rows, length)
        (logits,) = session.run(["logits"], {"idx": idx.numpy()})
        np.testing.assert_allclose(logits, model(idx), rtol=0, atol=1e-3)
    assert session.get_modelmeta().custom_metadata_map["vocabulary"] == "".join(VOCABULARY)


def test_gguf_holds_the_same_tensors_and_vocabulary(tmp_path):
    from gguf import GGUFReader

    checkpoint = save_random(tmp_path / "ck")
    export(checkpoint, "gguf", tmp_path / "model.gguf")
    reader = GGUFReader(tmp_path / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen3"
    assert fields["qwen3.context_length"] == checkpoint.hyperparameters["block_size"]
    assert [" " if t == "\u2581" else t for t in fields["tokenizer.ggml.tokens"]] == VOCABULARY
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    state = checkpoint.load_model().state_dict()
    ours = torch.cat([state[f"blocks.{i}.attn.qkv.weight"].flatten() for i in range(2)])
    theirs = [tensors[f"blk.{i}.attn_{part}.weight"].flatten() for i in range(2) for part in "qkv"]
    np.testing.assert_array_equal(np.concatenate(theirs), ours.numpy())
    assert sum(tensor.size for tensor in tensors.values()) == sum(value.numel() for value in state.values())


def test_gguf_refuses_what_its_tokenizer_cannot_tell_apart(tmp_path):
    save_checkpoint(tmp_path / "ck", random_model(vocab_size=2), CharTokenizer([" ", "\u2581"]), {})
    with pytest.raises(ConfigError, match=r"U\+2581"):
        export(Checkpoint.read(tmp_path / "ck"), "gguf", tmp_path / "model.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ck"]
