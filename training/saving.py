"""Save a checkpoint in the format that service/model/checkpoint.py describes and loads. Saving is atomic."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save

from service.model.checkpoint import FORMAT_VERSION, MANIFEST, WEIGHTS, hf_config, layout, previous_of
from service.model.gpt import GPT
from service.model.tokenizer import CharTokenizer


def named_tensors(model: GPT) -> dict[str, torch.Tensor]:
    """The weights under Hugging Face's names, fp32, on the CPU."""
    state, tensors = model.state_dict(), dict[str, torch.Tensor]()
    for ours, theirs in layout(model.config).items():
        parts = state[ours].detach().float().cpu().split([shape[0] for shape in theirs.values()])
        tensors |= {name: part.contiguous() for name, part in zip(theirs, parts, strict=True)}
    return tensors


def save_checkpoint(
    path: str | Path,
    model: GPT,
    tokenizer: CharTokenizer,
    training: Mapping[str, Any],
    extra: Mapping[str, bytes] | None = None,
    dtype: Literal["float32", "float16"] = "float32",
) -> None:
    """Write a checkpoint folder, atomically replacing any previous one.

    `training` becomes training.json; `extra` adds files (name -> content), which the manifest covers too; `dtype` is
    that of the stored weights. A failure, a full disk or a kill leaves the previous folder intact.

    Raises:
        OSError: the disk is full or not writable.
    """
    special: dict[str, int] = {}
    if training.get("recipe", {}).get("records") and "\n" in tokenizer:
        # Not in tokenizer_config.json: transformers leaves special tokens out of decoded texts.
        special = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.encode("\n")[0])
        extra = {"generation_config.json": _dump(special), **(extra or {})}
    files = {
        "config.json": _dump(hf_config(model.config) | {"dtype": dtype} | special),
        WEIGHTS: save(
            {name: t.to(getattr(torch, dtype)) for name, t in named_tensors(model).items()}, {"format": "pt"}
        ),
        "tokenizer.json": _dump(_hf_tokenizer(tokenizer)),
        "tokenizer_config.json": _dump(
            {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        ),
        "training.json": _dump(training),
        **(extra or {}),
    }
    listed = {name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in files.items()}
    files[MANIFEST] = _dump({"format_version": FORMAT_VERSION, "files": listed})
    try:
        with replacing_folder(Path(path)) as folder:
            for name, data in files.items():
                (folder / name).write_bytes(data)
    except OSError as error:
        error.filename = error.filename or str(path)  # failed writes do not set it
        raise


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A temporary folder of files that atomically replaces `path` when the block succeeds.

    On Linux and macOS the two folders are exchanged. Where the system or file system lacks that call, the old folder is
    moved to `.<name>.previous` first; after a kill before all is done, `restore_folder` moves it back.
    Concurrent processes all succeed; the last one's folder remains.

    Raises:
        OSError: the folder cannot be written.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.saving-"
    for leftover in path.parent.glob(f"{glob.escape(prefix)}*"):
        if not _is_other_process(leftover.name.removeprefix(prefix)):
            shutil.rmtree(leftover, ignore_errors=True)
    new = path.parent / f"{prefix}{os.getpid()}"
    new.mkdir()
    try:
        yield new
        for written in (*new.iterdir(), new):
            _fsync(written)
        try:
            new.rename(path)  # the first save
        except OSError:
            if not path.exists():
                raise
            if not _exchange(new, path):
                _move(path, previous_of(path))
                new.rename(path)
        if previous_of(path).is_dir() and not new.exists():
            previous_of(path).rename(new)  # done; removed below
        try:
            _fsync(path.parent)
        except OSError as error:
            reason = f"it is saved, but a power failure could lose it: {error.strerror}"
            raise OSError(error.errno, reason, str(path)) from error
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def restore_folder(path: Path) -> None:
    """Undo a `replacing_folder` that was killed before it was done: put the old folder back."""
    if previous_of(path).is_dir():
        shutil.rmtree(path, ignore_errors=True)
        previous_of(path).rename(path)


def _is_other_process(pid: str) -> bool:
    """Whether another process with this PID is alive. (In a container, our own PID may be that of a killed save.)"""
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass  # it belongs to another user
    return int(pid) != os.getpid()


def _exchange(a: Path, b: Path) -> bool:
    """Atomically exchange two paths (renameat2 of Linux, renamex_np of macOS); False where this is not supported."""
    library, exchange = ctypes.CDLL(None, use_errno=True), 2  # RENAME_EXCHANGE, RENAME_SWAP
    if hasattr(library, "renameat2"):
        at_cwd = -100
        failed = library.renameat2(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange)
    elif hasattr(library, "renamex_np"):
        failed = library.renamex_np(os.fsencode(a), os.fsencode(b), exchange)
    else:
        return False
    code = ctypes.get_errno()
    # EXDEV: a folder of a lower layer of overlayfs, such as one of an image.
    if failed and code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV):
        raise OSError(code, os.strerror(code), str(b))
    return not failed


def _move(folder: Path, to: Path) -> None:
    """Rename a folder; copy one that overlayfs cannot rename, since it lies in a lower layer. `to` is always whole."""
    shutil.rmtree(to, ignore_errors=True)
    try:
        folder.rename(to)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        part = to.with_name(f"{to.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(folder, part)
        part.rename(to)
        shutil.rmtree(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hf_tokenizer(tokenizer: CharTokenizer) -> dict[str, Any]:
    """One code point, one id, in the format of Hugging Face's tokenizers; there too unknown characters raise."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {character: i for i, character in enumerate(tokenizer.characters)},
            "unk_token": "",  # not a character, so never in the vocabulary
        },
    }


def _dump(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
