import hashlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import VOCABULARY, random_model, save_random

from service.model.checkpoint import Checkpoint, CheckpointError, replacing_folder, save_checkpoint
from service.model.tokenizer import CharTokenizer


def test_round_trip(tmp_path):
    model = random_model()
    save_checkpoint(tmp_path / "ck", model, CharTokenizer(VOCABULARY), {"seed": 3}, extra={"state.bin": b"\0\1"})
    checkpoint = Checkpoint.read(tmp_path / "ck")
    assert checkpoint.tokenizer.characters == VOCABULARY
    assert checkpoint.training == {"seed": 3}
    loaded = checkpoint.load_model()
    assert loaded.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert (tmp_path / "ck" / "state.bin").read_bytes() == b"\0\1"


def test_half_precision_halves_the_file(tmp_path):
    from transformers import AutoModelForCausalLM

    model = random_model()
    save_checkpoint(tmp_path, model, CharTokenizer(VOCABULARY), {}, dtype="float16")
    loaded = Checkpoint.read(tmp_path).load_model()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.half().float())
    assert (tmp_path / "model.safetensors").stat().st_size < 2 * model.num_parameters + 4000
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.float16
    idx = torch.randint(61, (1, 30))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(loaded(idx), theirs(idx).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_read_without_torch_as_the_model_has_them(tmp_path, monkeypatch, dtype):
    from safetensors import torch as safetensors

    model = random_model(dtype).to(torch.float64)
    save = safetensors.save
    monkeypatch.setattr(safetensors, "save", lambda tensors, about: save({k: t.to(dtype) for k, t in tensors.items()}))
    save_checkpoint(tmp_path, model, CharTokenizer(VOCABULARY), {})
    weights, state = Checkpoint.read(tmp_path).load_weights(), model.float().state_dict()
    assert set(weights) == set(state)
    for name, value in state.items():
        assert weights[name].itemsize == (4 if dtype == torch.bfloat16 else dtype.itemsize)
        assert torch.equal(torch.from_numpy(weights[name]).float(), value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_inner", 24, r"layers.0.mlp.gate_proj.weight must have shape (24, 16) by config.json, got (48, 16)"),
        ("n_kv_head", 4, r"layers.0.self_attn.k_proj.weight must have shape (16, 16) by config.json, got (8, 16)"),
        ("n_embd", 32, r"model.embed_tokens.weight must have shape (61, 32) by config.json, got (61, 16)"),
    ],
)
def test_weights_of_another_shape_than_the_config_are_refused(tmp_path, field, value, message):
    checkpoint = save_random(tmp_path)
    other = replace(checkpoint, hyperparameters=checkpoint.hyperparameters | {field: value})
    for load in (other.load_weights, other.load_model):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            load()


def test_transformers_loads_the_tokenizer_unchanged(tmp_path):
    from transformers import AutoTokenizer

    characters = sorted({*"ab \n\r\t'\"\\", "é", "€", "漢", "😀", "\u0301", "\0"})
    save_checkpoint(tmp_path, random_model(vocab_size=len(characters)), CharTokenizer(characters), {})
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(characters) + "e\u0301 漢  a\r\nb"
    ours = CharTokenizer(characters)
    assert theirs(text.replace("e", "")).input_ids == ours.encode(text.replace("e", ""))
    assert theirs.decode(ours.encode(text.replace("e", ""))) == text.replace("e", "")
    with pytest.raises(Exception, match="WordLevel"):
        theirs("z")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "training.json"])
def test_a_flipped_byte_is_refused(tmp_path, name):
    save_random(tmp_path / "ck")
    file = tmp_path / "ck" / name
    data = bytearray(file.read_bytes())
    for place in range(0, len(data), max(1, len(data) // 50)):
        data[place] ^= 1
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=name):
            Checkpoint.read(tmp_path / "ck")
        data[place] ^= 1
    file.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=name):
        Checkpoint.read(tmp_path / "ck")
    file.unlink()
    with pytest.raises(CheckpointError, match=name):
        Checkpoint.read(tmp_path / "ck")


def test_weights_altered_after_reading_are_refused(tmp_path):
    checkpoint = save_random(tmp_path / "ck")
    file = tmp_path / "ck" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        checkpoint.load_model()


def test_unknown_versions_and_invalid_folders_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="not a folder"):
        Checkpoint.read(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read"):
        Checkpoint.read(tmp_path)
    save_random(tmp_path / "ck")
    config = tmp_path / "ck" / "config.json"
    changed = json.loads(config.read_text())
    changed["chargpt"]["format_version"] = 99
    config.write_text(json.dumps(changed))
    manifest = tmp_path / "ck" / "manifest.json"
    listed = json.loads(manifest.read_text())
    listed["files"]["config.json"] = {
        "sha256": hashlib.sha256(config.read_bytes()).hexdigest(),
        "size": config.stat().st_size,
    }
    manifest.write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match="format_version is 99, this program reads 1"):
        Checkpoint.read(tmp_path / "ck")


def test_a_failed_save_leaves_the_previous_checkpoint(tmp_path):
    before = save_random(tmp_path / "ck")
    with pytest.raises(OSError, match="No such file"):
        # written last, and fails
        save_checkpoint(tmp_path / "ck", random_model(seed=1), CharTokenizer(VOCABULARY), {}, {"no/such/folder": b""})
    assert Checkpoint.read(tmp_path / "ck").digest == before.digest
    assert os.listdir(tmp_path) == ["ck"]


SAVER = """
import sys, itertools
sys.path.insert(0, {tests!r})
from pathlib import Path
from helpers import VOCABULARY, random_model
from service.model.checkpoint import save_checkpoint
from service.model.tokenizer import CharTokenizer
models = [random_model(seed=seed) for seed in range(2)]
for i in itertools.count():
    save_checkpoint({folder!r}, models[i % 2], CharTokenizer(VOCABULARY), {{"save": i}})
    print(i, flush=True)
"""


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=[pytest.mark.chaos, pytest.mark.timeout(1800)])])
def test_killed_while_saving(tmp_path, chance, kills):
    """SIGKILL at random moments of a save leaves a complete folder, the last save or the one before. The next save
    removes all leftovers."""
    folder = tmp_path / "ck"
    script = SAVER.format(tests=str(Path(__file__).parents[1]), folder=str(folder))
    interrupted = 0
    for kill in range(kills):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        assert set(os.listdir(tmp_path)) <= {"ck", f".ck.saving-{process.pid}"}, "leftovers of the previous process"
        time.sleep(chance.uniform(0, 0.2))
        process.kill()
        reported = [0, *map(int, process.communicate()[0].split())][-1]
        checkpoint = Checkpoint.read(folder)
        saved = checkpoint.training["save"]
        assert saved in (reported, reported + 1)
        for name, value in random_model(seed=saved % 2).state_dict().items():
            assert torch.equal(checkpoint.load_model().state_dict()[name], value)
        interrupted += len(os.listdir(tmp_path)) > 1
        print(f"kill {kill + 1} of {kills} in save {reported + 1}; {interrupted} left a partial folder", flush=True)
    save_random(folder)
    assert os.listdir(tmp_path) == ["ck"]


SLOW_SAVER = """
import sys
from pathlib import Path
from service.model.checkpoint import replacing_folder
with replacing_folder(Path(sys.argv[1])) as new:
    (new / "writer").write_text("slow")
    print("started", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("first", [True, False])
def test_two_processes_save_at_once(tmp_path, first):
    """One save starts and finishes during another: neither removes the other's files."""
    path = tmp_path / "folder"
    if not first:
        path.mkdir()
        (path / "writer").write_text("earlier")
    command = [sys.executable, "-c", SLOW_SAVER, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as slow:
        assert slow.stdin is not None and slow.stdout is not None
        assert slow.stdout.readline() == "started\n"
        with replacing_folder(path) as new:
            (new / "writer").write_text("quick")
        assert (path / "writer").read_text() == "quick"
        slow.communicate("end\n", timeout=60)
    assert slow.returncode == 0
    assert (path / "writer").read_text() == "slow"
    assert os.listdir(tmp_path) == ["folder"]
