import contextlib
import errno
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.model.checkpoint import REQUIRED, Checkpoint, CheckpointError
from service.model.counts import COUNTS, MAX_BYTES, Counts
from service.model.tokenizer import CharTokenizer
from tests.helpers import VOCABULARY, random_model, save_random
from tests.toolbox.launch import ROOT
from tests.toolbox.needs import missing
from training.folders import replacing_folder, restore_folder
from training.run import saving
from training.run.saving import save_checkpoint


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_round_trip(tmp_path, dtype):
    """For transformers too; half precision halves the file."""
    from transformers import AutoModelForCausalLM

    model, kind = random_model(), getattr(torch, dtype)
    save_checkpoint(tmp_path, model, CharTokenizer(VOCABULARY), {"seed": 3}, {"state.bin": b"\0\1"}, dtype)
    checkpoint = Checkpoint.read(tmp_path)
    assert (checkpoint.config, checkpoint.tokenizer.characters) == (model.config, VOCABULARY)
    assert (checkpoint.training["seed"], checkpoint.read_file("state.bin")) == (3, b"\0\1")
    loaded = checkpoint.load_model().state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value.to(kind).float())
    assert checkpoint.files["model.safetensors"].size < kind.itemsize * model.config.num_parameters + 4000
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == kind and torch.equal(theirs.lm_head.weight, model.head.weight.to(kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_read_without_torch_as_the_model_has_them(tmp_path, monkeypatch, dtype):
    model, save = random_model(dtype).to(torch.float64), saving.save
    monkeypatch.setattr(saving, "save", lambda tensors, about: save({k: t.to(dtype) for k, t in tensors.items()}))
    save_checkpoint(tmp_path, model, CharTokenizer(VOCABULARY), {})
    weights, state = Checkpoint.read(tmp_path).load_weights(), model.float().state_dict()
    assert set(weights) == set(state)
    for name, value in state.items():
        assert weights[name].itemsize == (4 if dtype == torch.bfloat16 else dtype.itemsize)
        assert torch.equal(torch.from_numpy(weights[name]).float(), value)


def test_transformers_loads_the_tokenizer_unchanged(tmp_path):
    from transformers import AutoTokenizer

    characters = sorted({*"ab \n\r\t'\"\\", "é", "€", "漢", "😀", "\u0301", "\0"})
    save_checkpoint(tmp_path, random_model(vocab_size=len(characters)), CharTokenizer(characters), {})
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(characters) + "\u0301 漢  a\r\nb"
    ids = CharTokenizer(characters).encode(text)
    assert theirs(text).input_ids == ids
    for skips in (False, True):  # as transformers serve and vLLM decode; a special line break would be left out
        assert theirs.decode(ids, skip_special_tokens=skips) == text
    with pytest.raises(Exception, match="WordLevel"):
        theirs("z")


def test_a_failed_save_leaves_the_previous_checkpoint(tmp_path):
    before = save_random(tmp_path / "ck")
    with pytest.raises(OSError, match="No such file"):
        # written last, and fails
        save_checkpoint(tmp_path / "ck", random_model(seed=1), CharTokenizer(VOCABULARY), {}, {"no/such/folder": b""})
    assert Checkpoint.read(tmp_path / "ck").digest == before.digest
    assert os.listdir(tmp_path) == ["ck"]


def save_again_and_again(folder, reports):
    for i in itertools.count():
        save_checkpoint(folder, random_model(seed=i % 2), CharTokenizer(VOCABULARY), {"save": i})
        reports.send(i)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=[pytest.mark.chaos, pytest.mark.timeout(1800)])])
def test_killed_while_saving(tmp_path, chance, kills):
    """SIGKILL at random moments of a save leaves a complete folder, the last save or the one before. The next save
    removes all leftovers."""
    folder, forks = tmp_path / "ck", multiprocessing.get_context("fork")
    for _ in range(kills):
        reading, reports = forks.Pipe(duplex=False)
        process = forks.Process(target=save_again_and_again, args=(folder, reports))
        process.start()
        reports.close()
        reported = reading.recv()
        assert set(os.listdir(tmp_path)) <= {"ck", f".ck.saving-{process.pid}"}, "leftovers of the previous process"
        time.sleep(chance.uniform(0, 0.2))
        process.kill()
        with contextlib.suppress(EOFError):
            while True:
                reported = reading.recv()
        process.join()
        checkpoint = Checkpoint.read(folder)
        saved = checkpoint.training["save"]
        assert saved in (reported, reported + 1)
        for name, value in random_model(seed=saved % 2).state_dict().items():
            assert torch.equal(checkpoint.load_model().state_dict()[name], value)
    save_random(folder)
    assert os.listdir(tmp_path) == ["ck"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", ["moving", "copying", "removing", "renaming", "cleaning"])
def test_killed_while_replacing_a_folder_that_cannot_be_exchanged(tmp_path, monkeypatch, at):
    """As on a network file system, or in the lower layer of overlayfs: a run finds the old folder again, whole, and a
    reader of the message knows where it is."""
    before, folder, previous = save_random(tmp_path / "ck"), tmp_path / "ck", tmp_path / ".ck.previous"
    rename, copytree, rmtree = Path.rename, shutil.copytree, shutil.rmtree
    is_copied = at in ("copying", "removing")

    def killed_rename(self, target):
        if self == folder and is_copied:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        is_renaming = target == folder and previous.exists()
        if {"moving": self == folder, "renaming": is_renaming, "cleaning": self == previous}.get(at):
            raise Killed
        return rename(self, target)

    def killed_copy(source, target):
        copytree(source, target)
        if at == "copying":
            (target / "model.safetensors").unlink()
            raise Killed

    def killed_remove(which, **options):
        if at == "removing" and which == folder:
            for name in ("manifest.json", "model.safetensors"):
                (folder / name).unlink()
            raise Killed
        rmtree(which, **options)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("training.folders._exchange", lambda a, b: False)
        patch.setattr(Path, "rename", killed_rename)
        patch.setattr(shutil, "copytree", killed_copy)
        patch.setattr(shutil, "rmtree", killed_remove)
        save_random(folder, seed=1)
    if at in ("removing", "renaming"):
        with pytest.raises(CheckpointError, match=f"a save was interrupted; rename {previous} to {folder} to"):
            Checkpoint.read(folder)
    restore_folder(folder)
    assert Checkpoint.read(folder).digest == before.digest
    monkeypatch.setattr("training.folders._exchange", lambda a, b: False)
    assert save_random(folder, seed=2).digest != before.digest
    assert set(os.listdir(tmp_path)) <= {"ck", ".ck.previous.part"}


OVERLAY = """
set -e
mount -t tmpfs chargpt "$0"
cd "$0"
mkdir lower upper work merged
"$1" -c "$2" lower/ck
mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged
echo mounted
for i in 1 2; do "$1" -c "$2" merged/ck; done
ls -A merged merged/ck
cat merged/ck/written
"""
WRITE = """
import sys
from pathlib import Path
from training.folders import replacing_folder
with replacing_folder(Path(sys.argv[1])) as new:
    (new / "written").write_text(sys.argv[1])
    print("started", flush=True)
    sys.stdin.readline()
"""


def test_a_folder_of_an_image_is_replaced(tmp_path):
    """overlayfs can neither exchange nor rename a folder of a lower layer."""
    for rights in ([], ["--map-root-user"]):
        command = ["unshare", "--mount", *rights, "sh", "-c", OVERLAY, str(tmp_path), sys.executable, WRITE]
        env, nothing = os.environ | {"PYTHONPATH": str(ROOT)}, subprocess.DEVNULL
        done = subprocess.run(command, cwd=ROOT, env=env, stdin=nothing, capture_output=True, text=True)
        if "mounted" in done.stdout:
            break
    else:
        missing("mount", f"cannot mount a file system: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == "mounted started started merged: ck merged/ck: written merged/ck".split()


@pytest.mark.parametrize("first", [True, False])
def test_two_processes_save_at_once(tmp_path, first):
    """One save starts and finishes during another: neither removes the other's files."""
    path = tmp_path / "folder"
    if not first:
        path.mkdir()
        (path / "written").write_text("earlier")
    command = [sys.executable, "-c", WRITE, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as slow:
        assert slow.stdin is not None and slow.stdout is not None
        assert slow.stdout.readline() == "started\n"
        with replacing_folder(path) as new:
            (new / "written").write_text("quick")
        assert (path / "written").read_text() == "quick"
        slow.communicate("end\n")
    assert slow.returncode == 0
    assert (path / "written").read_text() == str(path)
    assert os.listdir(tmp_path) == ["folder"]


# -- folders that are wrong, hostile or replaced --


def write(file, data):
    """A new file: ext4 writes an overwritten one to the disk at once."""
    file.unlink()
    file.write_bytes(data)


def sign(folder, *also):
    """Lists the files of the manifest, and `also`, as they are now."""
    manifest = folder / "manifest.json"
    about = json.loads(manifest.read_text())
    for name in [*about["files"], *also]:
        data = (folder / name).read_bytes()
        about["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    write(manifest, json.dumps(about).encode())


def replace(folder, name, data):
    """A new file, signed unless it is the manifest."""
    write(folder / name, data)
    if name != "manifest.json":
        sign(folder)


def edit(folder, name, change):
    """`change` of the JSON of a file."""
    about = json.loads((folder / name).read_text())
    change(about)
    replace(folder, name, json.dumps(about).encode())


def refusal(folder):
    """The message, which is one line and names the folder."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.read(folder).load_weights()
    message = str(caught.value)
    assert message.isprintable() and len(message) < len(str(folder)) + 400, message
    assert message.startswith(str(folder))
    return message.removeprefix(str(folder)).removeprefix("/")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "ck"
    save_random(folder, n_embd=8, n_layer=1, n_head=2, n_kv_head=1)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "ck"))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float16, math.inf), (torch.bfloat16, -math.inf), (torch.float32, math.nan), (torch.float64, -1e39)],
)
def test_every_value_of_the_weights_must_be_finite(folder, dtype, value):
    import safetensors.torch

    name, weights = "model.layers.0.mlp.up_proj.weight", (folder / "model.safetensors").read_bytes()
    tensors = {name: tensor.to(dtype) for name, tensor in safetensors.torch.load(weights).items()}
    tensors[name][-1, -1] = value
    replace(folder, "model.safetensors", safetensors.torch.save(tensors))
    assert refusal(folder) == f"model.safetensors: {name} has values that are NaN, infinite or beyond float32"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rms_norm_eps", math.nan, "config.json: JSON is malformed: invalid character"),
        ("rope_theta", 1e300, "config.json: rope_theta must be in [1.0, 1000000000000.0], got 1e+300"),
        ("num_hidden_layers", 10**8, "config.json: n_layer must be in [1, 10000], got 100000000"),
        ("num_hidden_layers", 10_000, "model.safetensors: config.json describes 7,920,984 weights, got 8,448 bytes"),
        ("intermediate_size", 10**6, "model.safetensors: config.json describes 24,00"),
        ("vocab_size", 10**30, "config.json: vocab_size must be in [1, 1114112], got 1" + 30 * "0"),
        ("vocab_size", 62, ": vocab_size in config.json is 62, but the tokenizer has 61 characters"),
        ("model_type", "llama", "config.json: model_type is 'llama', not 'qwen3'"),
        ("hidden_act", "gelu", "config.json: hidden_act must be 'silu', got 'gelu'"),
        ("layer_types", ["full_attention"], "config.json: layer_types must be ['sliding_attention'], got ['full_"),
        ("chargpt", [], "config.json: Expected `object`, got `array` - at `$.chargpt`"),
    ],
)
def test_bad_values_in_the_config_are_refused_before_the_weights_are_read(folder, key, value, message):
    edit(folder, "config.json", lambda config: config.pop("layer_types") and config.update({key: value}))
    write(folder / "model.safetensors", b"not read")
    assert refusal(folder).startswith(message)


def test_a_config_without_a_key_and_other_versions_of_the_format_are_refused(folder):
    edit(folder, "config.json", lambda config: config.pop("hidden_size"))
    assert refusal(folder) == "config.json: lacks the key 'hidden_size'"
    edit(folder, "config.json", lambda config: config["chargpt"].update(format_version=99))
    assert refusal(folder) == "config.json: chargpt.format_version is 99, this program reads 1"
    edit(folder, "manifest.json", lambda about: about.update(format_version=2))
    assert refusal(folder) == "manifest.json: format_version is 2, this program reads 1"


@pytest.mark.parametrize(
    "name",
    ["/dev/zero", "../outside", "a/b", "..", "", ".git", "a\nb", "a\\b", "a\0b", "manifest.json", "A" * 5000 + "/"],
)  # fmt: skip
def test_listed_names_must_be_plain(folder, name):
    (folder.parent / "outside").write_text("x")
    entry = {"sha256": hashlib.sha256(b"x").hexdigest(), "size": 1}
    edit(folder, "manifest.json", lambda about: about["files"].update({name: entry}))
    assert refusal(folder).startswith("manifest.json: lists ")


def test_further_files_are_allowed_and_verified(folder):
    (folder / "LICENSE.txt").write_text("free")
    sign(folder, "LICENSE.txt")
    (folder / "README.md").write_text("not listed, and ignored")
    Checkpoint.read(folder)
    (folder / "LICENSE.txt").write_text("paid")
    assert refusal(folder).startswith("LICENSE.txt: size or SHA-256 differs")


def test_counts_are_optional_and_malformed_ones_are_refused(folder):
    assert Checkpoint.read(folder).load_counts() is None
    V, file = Checkpoint.read(folder).config.vocab_size, folder / COUNTS
    file.write_bytes(Counts.count(np.arange(40) % 4, V).dump())
    sign(folder, COUNTS)
    checkpoint = Checkpoint.read(folder)
    assert checkpoint.load_counts().next([1])[0].argmax() == 2
    data = file.read_bytes()
    for wrong in (data[:-1], b"", Counts.count(np.full(40, V), V + 1).dump()):
        write(file, wrong)
        for read in (checkpoint.load_counts, partial(Checkpoint.read, folder)):
            with pytest.raises(CheckpointError, match=f"{file}: size or SHA-256 differs from manifest.json"):
                read()
        sign(folder)
        with pytest.raises(CheckpointError, match=f"{file}: "):
            Checkpoint.read(folder).load_counts()
    os.truncate(file, MAX_BYTES + 1)
    sign(folder)
    with pytest.raises(CheckpointError, match="must have at most 4,000,000 bytes, got 4,000,001"):
        Checkpoint.read(folder)


def test_the_n_grams_of_older_versions_are_not_read(folder):
    (folder / "ngrams.bin").write_bytes(b"anything")
    sign(folder, "ngrams.bin")
    assert Checkpoint.read(folder).load_counts() is None


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json", "more"])
@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo, lambda path: os.mknod(path, stat.S_IFSOCK | 0o600), os.mkdir,
        lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to("nothing"),
    ],
    ids=["fifo", "socket", "folder", "device", "dangling"],
)  # fmt: skip
def test_files_that_are_not_regular_are_refused_without_waiting(folder, name, make):
    (folder / "more").write_text("more")
    sign(folder, "more")
    (folder / name).unlink()
    make(folder / name)
    assert re.fullmatch(rf"{name}: (not a regular file|cannot be read: .+)", refusal(folder))


def test_links_to_regular_files_are_followed(folder):
    """As Hugging Face's cache and Kubernetes' volumes have them."""
    (folder / "..2026").mkdir()
    (folder / "..data").symlink_to("..2026")
    for file in [file for file in folder.iterdir() if not file.name.startswith("..")]:
        file.rename(folder / "..2026" / file.name)
        file.symlink_to(Path("..data") / file.name)
    link = folder.with_name("link")
    link.symlink_to(folder)
    assert Checkpoint.read(link).load_weights()


@pytest.mark.parametrize("name", [*REQUIRED, "more"])
def test_a_huge_file_is_refused_by_its_listed_size(folder, name):
    """Sparse, a terabyte; reading it would take minutes."""
    (folder / "more").touch()
    sign(folder, "more")
    os.truncate(folder / name, 1 << 40)
    edit(folder, "manifest.json", lambda about: about["files"][name].update(size=1 << 40))
    assert re.fullmatch(rf"{name}: must have at most [\d,]+ bytes, got 1,099,511,627,776", refusal(folder))
    edit(folder, "manifest.json", lambda about: about["files"][name].update(size=5))
    assert refusal(folder).startswith(name)


def test_a_manifest_that_is_huge_or_does_not_list_a_required_file_is_refused(folder):
    for name in REQUIRED:
        edit(folder, "manifest.json", lambda about, name=name: about["files"].pop(name))
        assert refusal(folder) == f"manifest.json: {name} is not listed"
        sign(folder, name)
    os.truncate(folder / "manifest.json", 1 << 40)
    assert refusal(folder) == "manifest.json: must have at most 1,048,576 bytes, got 1,099,511,627,776"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": 0}, "ids must be 0 to 60, but no character has id "),
        ({"b": -1}, "ids must be 0 to 60, but no character has id "),
        ({"b": 10**40}, "ids must be 0 to 60, but no character has id "),
        ({"b": "1"}, "Expected `int`, got `str` - at `$.model.vocab[...]`"),
        ({"b": 1.0}, "Expected `int`, got `float` - at `$.model.vocab[...]`"),
        ({"b": ..., "bc": 36}, "vocabulary entry 36 must be a single, unique Unicode character, got 'bc'"),
        ({"b": ..., "": 36}, "vocabulary entry 36 must be a single, unique Unicode character, got ''"),
        ({"b": ..., "\ud800": 36}, "JSON is malformed: "),
    ],
)
def test_bad_vocabularies_are_refused(folder, changes, message):
    vocab = Checkpoint.read(folder).tokenizer.characters
    changed = {c: i for i, c in enumerate(vocab)} | changes
    changed = {c: i for c, i in changed.items() if i is not ...}
    assert vocab[36] == "b"
    edit(folder, "tokenizer.json", lambda about: about["model"].update(vocab=changed))
    assert refusal(folder).startswith(f"tokenizer.json: {message}")


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        (
            {"text": "aé", "log_probabilities": [-1.0]},
            "probe must have a text in the vocabulary, and a number for each",
        ),
        ({"text": "ab", "log_probabilities": []}, "probe must have a text in the vocabulary, and a number for each"),
        ({"text": "a", "log_probabilities": []}, "Expected `str` of length >= 2 - at `$.probe.text`"),
        ({"text": "ab" * 500, "log_probabilities": [-1] * 999}, "Expected `str` of length <= 64 - at `$.probe.text`"),
        (
            {"text": "ab", "log_probabilities": ["-1"]},
            "Expected `float`, got `str` - at `$.probe.log_probabilities[0]`",
        ),
    ],
)
def test_bad_probes_are_refused(folder, probe, message):
    edit(folder, "training.json", lambda about: about.update(probe=probe))
    assert refusal(folder).startswith(f"training.json: {message}")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_save_records_what_the_model_computes(tmp_path, dtype):
    """Another weight gives another model; checkpoints of older versions have no probe, and are taken as they are."""
    model = random_model(block_size=4)
    state = torch.get_rng_state()
    save_checkpoint(tmp_path, model, CharTokenizer(VOCABULARY), {}, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), state)
    checkpoint, loaded = Checkpoint.read(tmp_path), Checkpoint.read(tmp_path).load_model()

    def forward(ids):
        return loaded(torch.tensor([ids]))[0].numpy()

    assert checkpoint.is_computed_by(forward)
    ids = checkpoint.tokenizer.encode(checkpoint.probe.text)
    exact = torch.from_numpy(forward(ids)).log_softmax(-1)[range(15), ids[1:]]
    assert checkpoint.probe.log_probabilities == pytest.approx(exact.tolist(), abs=1e-4)
    loaded.blocks[0].mlp.proj.weight.mul_(1.1)
    assert not checkpoint.is_computed_by(forward)
    edit(tmp_path, "training.json", lambda about: about.pop("probe"))
    assert Checkpoint.read(tmp_path).is_computed_by(forward)


@pytest.mark.parametrize("name", ["manifest.json", "config.json", "tokenizer.json", "training.json"])
@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{}x", b"\xff", '{"a": 1}'.encode("utf-16"), b'{"files": NaN}',
        b'{"a": ' + b"[" * 100_000, b'{"a": ' * 900 + b"1" + b"}" * 900, b'{"a": ' + b"9" * 100_000 + b"}",
        b'{"a": 1e999}',
        b'{"losses": [], "files": [], "model": [], "chargpt": 0}', b'{"losses": {"whole": "x"}, "files": {"a": []}}',
        b'{"a": "\\ud800"}', b"PK\3\4", b'{"data": 1, "format_version": true}',
    ],
)  # fmt: skip
def test_malformed_json_is_refused(folder, name, data):
    replace(folder, name, data)
    assert refusal(folder).startswith(f"{name}: ")


@pytest.mark.parametrize("name", ["manifest.json", "config.json", "tokenizer.json", "training.json"])
def test_files_saved_by_windows_editors_load(folder, name):
    """CRLF, and a byte order mark."""
    replace(folder, name, (folder / name).read_text().replace("\n", "\r\n").encode("utf-8-sig"))
    assert Checkpoint.read(folder).load_weights()


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 10**30, 10**400, "/dev/zero", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


def places(value):
    """(container, key) of every value inside `value`."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def mutated_json(data, value):
    """The JSON of `value`, with a value or key replaced or removed, or some bytes changed."""
    container, key = data.draw(st.sampled_from(list(places(value))))
    match data.draw(st.sampled_from(["replace", "remove", "rename", "bytes"])):
        case "replace":
            container[key] = data.draw(junk)
        case "rename" if isinstance(container, dict):
            container[data.draw(st.text(max_size=3))] = container.pop(key)
        case "remove":
            del container[key]
    text = bytearray(json.dumps(value).encode())
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(text)))
        text[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    return bytes(text)


@settings(max_examples=100)
@given(
    st.data(), st.sampled_from(["manifest.json", "config.json", "tokenizer.json", "training.json", "model.safetensors"])
)
def test_a_signed_folder_with_any_change_loads_or_is_refused(original, data, name):
    file, manifest = original / name, original / "manifest.json"
    before, listed = file.read_bytes(), manifest.read_bytes()
    try:
        if name == "model.safetensors":
            size = int.from_bytes(before[:8], "little")
            header, weights = mutated_json(data, json.loads(before[8 : 8 + size])), before[8 + size :]
            size = data.draw(st.just(len(header)) | st.integers(0, 2**64 - 1))
            replace(original, name, size.to_bytes(8, "little") + header + weights)
        else:
            replace(original, name, mutated_json(data, json.loads(before)))
        try:
            checkpoint = Checkpoint.read(original)
            checkpoint.load_weights()
        except CheckpointError as error:
            assert str(error).isprintable() and len(str(error)) < len(str(original)) + 400
        else:
            assert checkpoint.config.receptive_field > 0
            assert msgspec.json.encode(checkpoint.training)  # as GET /info does
    finally:
        write(file, before)
        write(manifest, listed)


def test_any_flipped_bit_or_truncation_is_refused(folder, chance):
    """150 of each; manifest.json is found by the digest."""
    digest = Checkpoint.read(folder).digest
    originals = {file: file.read_bytes() for file in folder.iterdir()}
    places = [(file, place) for file, data in originals.items() for place in range(len(data))]
    for file, place in chance.sample(places, 150):
        data = originals[file]
        with open(file, "r+b", buffering=0) as stream:
            for altered in (bytes([data[place] ^ 1 << chance.randrange(8)]), b""):
                stream.seek(place)
                stream.write(altered)
                stream.truncate(len(data) if altered else place)
                with pytest.raises(CheckpointError):
                    Checkpoint.read(folder, digest)
            stream.write(data[place:])
    assert Checkpoint.read(folder, digest).load_weights()


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def with_head(header, **changes):
    return header | {"lm_head.weight": header["lm_head.weight"] | changes}


def pack(header, data):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header, data: b"", "config.json describes 1,7"),
        (lambda header, data: pack(header, data)[:-1], "Error while deserializing: "),
        (lambda header, data: (2**63).to_bytes(8, "little") + pack(header, data)[8:], "the header must have at most "),
        (lambda header, data: pack(b"[" * 10_000, data), "Error while deserializing: "),
        (lambda header, data: pack(header | {"more": dict(header["lm_head.weight"])}, data), "Error while "),
        (lambda header, data: pack(header | {"\x1b[2J\u202e\n" * 500: EMPTY | {"data_offsets": [1, 1]}}, data),
         "Error while deserializing: invalid offset for tensor `\\x1b[2J\\u202e\\n\\x1b"),
        (lambda header, data: pack(header | {"more\n" * 500: EMPTY}, data), "missing or unknown tensors: 'more"),
        (lambda header, data: pack({"renamed": header.pop("lm_head.weight")} | header, data),
         "missing or unknown tensors: 'lm_head.weight', 'renamed'"),
        (lambda header, data: pack(with_head(header, dtype="I32"), data),
         "lm_head.weight must be one of F64, F32, F16, BF16, got I32"),
        (lambda header, data: pack(with_head(header, shape=[8, 61]), data),
         "lm_head.weight must have shape (61, 8) by config.json, got (8, 61)"),
    ],
)  # fmt: skip
def test_malformed_safetensors_are_refused(folder, change, message):
    data = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")  # of the header
    replace(folder, "model.safetensors", change(json.loads(data[8:end]), data[end:]))
    assert refusal(folder).startswith(f"model.safetensors: {message}")


class Payload:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_a_pickle_is_never_executed(folder, tmp_path):
    executed = tmp_path / "executed"
    pickle.loads(pickle.dumps(Payload(executed)))
    assert executed.exists()
    executed.unlink()
    malicious = pickle.dumps(Payload(executed))
    (folder / "pytorch_model.bin").write_bytes(malicious)
    sign(folder, "pytorch_model.bin")
    Checkpoint.read(folder).load_model()
    weights = (folder / "model.safetensors").read_bytes()
    for data in (malicious, malicious + weights, malicious.ljust(len(weights), b".")):
        replace(folder, "model.safetensors", data)
        assert refusal(folder).startswith("model.safetensors: ")
    assert not executed.exists()


def test_a_folder_replaced_after_reading_is_refused(tmp_path):
    checkpoint = save_random(tmp_path / "ck")
    assert Checkpoint.read(tmp_path / "ck", checkpoint.digest).files == checkpoint.files
    replaced = save_random(tmp_path / "ck", seed=1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: size or SHA-256 differs from manifest\.json"):
        checkpoint.load_weights()
    with pytest.raises(CheckpointError, match=f"replaced: .* {replaced.digest}, expected {checkpoint.digest}"):
        Checkpoint.read(tmp_path / "ck", checkpoint.digest)
    replaced.load_weights()
