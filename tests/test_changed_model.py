"""A source tree whose gpt.py was changed: which services and commands take the checkpoint that it trained."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from service.engine import native
from service.engine.backends import open_runner
from service.model.checkpoint import Checkpoint, CheckpointError
from tests.helpers import call, web
from tests.toolbox.launch import ROOT, Program, ServerError, free_port
from tests.training.runs import SHAPE, STEPS, TEXT, flags

SILU, RELU2 = "F.silu(gate) * up", "F.relu(gate).square() * up"
ATTENTION = "gate / (1 + np.exp(-gate)) * up", "np.maximum(gate, 0) ** 2 * up"
PROMPT = "the cat "
COMMANDS = """
import sys
from training.__main__ import main
first, second = sys.argv[1:sys.argv.index("+")], sys.argv[sys.argv.index("+") + 1:]
sys.argv[1:] = first
assert main() == 0
print("+", flush=True)
sys.argv[1:] = second
sys.exit(main())
"""


def python(tree: Path, *arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


def replace(file: Path, old: str, new: str) -> None:
    assert old in (text := file.read_text())
    file.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """The tree with ReLU² for SwiGLU's SiLU, the checkpoint that it trained, and what training printed."""
    folder = tmp_path_factory.mktemp("changed")
    for name in ("service", "training"):
        shutil.copytree(ROOT / name, folder / "tree" / name, ignore=shutil.ignore_patterns("__pycache__"))
    replace(folder / "tree/service/model/gpt.py", SILU, RELU2)
    (folder / "text.txt").write_text(TEXT)
    settings = flags(data=folder / "text.txt", out=folder / "run", **SHAPE, **STEPS)
    sampling = flags(checkpoint=folder / "run" / "best", prompt=PROMPT, max_tokens=60, seed=5)
    printed, text = python(folder / "tree", "-c", COMMANDS, "train", *settings, "+", "sample", *sampling).split("+\n")
    return SimpleNamespace(tree=folder / "tree", checkpoint=folder / "run" / "best", printed=printed, text=text)


def served(tree: Path, checkpoint: Path, backend: str) -> Program:
    port = free_port()
    command = [sys.executable, "-m", "service", "--checkpoint", checkpoint, "--port", port, "--threads", 1]
    command += ["--backend", backend] * (backend != "auto")
    return Program(command, port, "/readyz", cwd=tree, start_new_session=True)


def refused(tree: Path, checkpoint: Path, backend: str) -> str:
    """The log of a service that ends before it is ready."""
    with served(tree, checkpoint, backend) as server, pytest.raises(ServerError) as caught:
        server.wait_until_ready()
    return str(caught.value)


@pytest.mark.skipif(native.why_not() is not None, reason="no native engine")
def test_the_default_backend_refuses_it_and_names_the_one_that_serves_it(changed):
    assert "only torch will compute this model; serve it with --backend torch" in changed.printed
    log = refused(changed.tree, changed.checkpoint, "auto")
    assert "backend native does not compute the model: it was trained with a changed gpt.py; use --backend torch" in log
    assert "Traceback" not in log


def test_torch_serves_what_the_command_samples(changed):
    with served(changed.tree, changed.checkpoint, "torch") as server:
        server.wait_until_ready()
        body = {"prompt": PROMPT, "max_tokens": 60, "seed": 5}
        answer = web.post(f"{server.url}/generate", json=body).raise_for_status().json()
        assert PROMPT + answer["choices"][0]["text"] + "\n" == changed.text
        weights = web.post(f"{server.url}/v1/attention", json={"text": "cat"})
    assert weights.status_code == 400
    assert "model: was trained with a changed gpt.py, which service/model/attention.py does not" in weights.text


def test_with_the_reference_changed_alike_attention_is_shown(changed):
    import service.model.attention

    source, checkpoint = Path(service.model.attention.__file__).read_text(), Checkpoint.read(changed.checkpoint)
    assert source.count(ATTENTION[0]) == 1
    is_computed = []
    for text in (source, source.replace(*ATTENTION)):
        exec(compile(text, "attention.py", "exec"), namespace := {"__name__": "attention"})
        logits, weights = namespace["logits_of"], checkpoint.load_weights()
        is_computed.append(checkpoint.is_computed_by(lambda ids: logits(weights, checkpoint.config, ids)))  # noqa: B023
    assert is_computed == [False, True]


def test_the_original_source_tree_refuses_it(changed, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint = Checkpoint.read(changed.checkpoint)
    with pytest.raises(CheckpointError, match="was trained with another service/model/gpt.py, which computes"):
        open_runner(checkpoint, "torch", "float64", 2, 1)
    other, text, out = tmp_path / "text.txt", changed.checkpoint.parents[1] / "text.txt", tmp_path / "out"
    other.write_text(TEXT[: len(TEXT) // 2])
    before = [path.read_bytes() for path in sorted(changed.checkpoint.parent.rglob("*.json"))]
    for command in (
        ["sample", "--checkpoint", changed.checkpoint],
        ["evaluate", "--checkpoint", changed.checkpoint],
        ["score", "--checkpoint", changed.checkpoint, "--data", text],
        ["report", "--checkpoint", changed.checkpoint],
        ["lecture", "--checkpoint", changed.checkpoint, "--data", text],
        ["export", "--checkpoint", changed.checkpoint, "--to", "gguf", "--out", tmp_path / "model.gguf"],
        ["export", "--checkpoint", changed.checkpoint, "--to", "onnx", "--out", tmp_path / "model.onnx"],
        ["train", "--init-from", changed.checkpoint, "--data", other, "--out", out],
        ["train", "--teachers", changed.checkpoint, "--data", text, "--out", out, *flags(**SHAPE, **STEPS)],
        ["train", "--resume", "--out", changed.checkpoint.parent, "--steps", STEPS["steps"] + 8],
    ):
        assert call(command) == 1
        refusal = capsys.readouterr().err.splitlines()[-1]
        assert refusal.startswith("error: ") and "was trained with another service/model/gpt.py" in refusal
    assert before == [path.read_bytes() for path in sorted(changed.checkpoint.parent.rglob("*.json"))]
    assert {*tmp_path.iterdir()} <= {other, tmp_path / "cache"}


def test_the_changed_tree_refuses_a_checkpoint_of_the_original(changed, tmp_path):
    settings = flags(data=changed.checkpoint.parents[1] / "text.txt", out=tmp_path / "run", **SHAPE, **STEPS)
    assert call(["train", *settings]) == 0
    assert Checkpoint.read(tmp_path / "run" / "best").probe is not None
    log = refused(changed.tree, tmp_path / "run" / "best", "torch")
    assert "was trained with another service/model/gpt.py" in log and "Traceback" not in log
    assert log.endswith(": no inference process could start; the log says why, unless a signal ended it\n")
