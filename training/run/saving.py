"""Save a checkpoint in the format that service/model/checkpoint.py describes and loads. Saving is atomic."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors.torch import save

from service.model.checkpoint import (
    CHANGED,
    FORMAT_VERSION,
    MANIFEST,
    WEIGHTS,
    Probe,
    end_of_records,
    hf_config,
    layout,
)
from service.model.gpt import GPT
from service.model.tokenizer import RECORD_SEPARATOR, UNKNOWN, CharTokenizer
from training.folders import replacing_folder
from training.model.selfcheck import is_qwen3


def named_tensors(model: GPT) -> dict[str, torch.Tensor]:
    """Return the weights under Hugging Face's names, in fp32, on the CPU."""
    state, tensors = model.state_dict(), dict[str, torch.Tensor]()
    for ours, theirs in layout(model.config).items():
        parts = state[ours].detach().float().cpu().split([shape[0] for shape in theirs.values()])
        # Cloned, because gpt.py may use a tensor twice, and safetensors stores none twice.
        tensors |= {name: part.contiguous().clone() for name, part in zip(theirs, parts, strict=True)}
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

    `training` becomes training.json, with a probe of the model if its log-probabilities are finite. `extra` adds files
    (name -> content), which the manifest covers too. `dtype` is the type of the stored weights. A failure, a full disk
    or a kill leaves the previous folder intact.

    Raises:
        OSError: the disk is full or not writable.
    """
    special: dict[str, int] = {}
    end = end_of_records(training, tokenizer)
    if end is not None:
        special = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.encode(end)[0])
    stored = {name: t.to(getattr(torch, dtype)) for name, t in named_tensors(model).items()}
    copy = _stored_model(model, stored)
    probe = Probe.of(lambda ids: copy(torch.tensor([ids]))[0].numpy(), tokenizer)
    if all(map(math.isfinite, probe.log_probabilities)):
        training = {**training, "probe": msgspec.to_builtins(probe)}
    claimed = {} if is_qwen3(copy) else CHANGED
    generation: dict[str, Any] = {**special}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if tokenizer.unknown_id is not None:  # the service does not sample the unknown symbol either
        generation["suppress_tokens"] = [tokenizer.unknown_id]
        about["unk_token"] = UNKNOWN
    if end == RECORD_SEPARATOR:  # not the line break: transformers leaves special tokens out of decoded texts
        about |= dict.fromkeys(("bos_token", "eos_token"), end)
    if generation:
        extra = {"generation_config.json": _dump(generation), **(extra or {})}
    files = {
        "config.json": _dump(hf_config(model.config) | {"dtype": dtype} | special | claimed),
        WEIGHTS: save(stored, {"format": "pt"}),
        "tokenizer.json": _dump(_hf_tokenizer(tokenizer)),
        "tokenizer_config.json": _dump(about),
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
        error.filename = error.filename or str(path)  # a failed write does not set filename
        raise


def _stored_model(model: GPT, stored: Mapping[str, torch.Tensor]) -> GPT:
    """Return a model with the weights as they are stored, in float64 on the CPU."""
    with torch.random.fork_rng(devices=[]):  # a new model draws weights
        copy = GPT(model.config).double().eval().requires_grad_(False)
    copy.load_state_dict(
        {ours: torch.cat([stored[name] for name in theirs]) for ours, theirs in layout(model.config).items()}
    )
    return copy


def _hf_tokenizer(tokenizer: CharTokenizer) -> dict[str, Any]:
    """Return the tokenizer, one id per code point, in the format of Hugging Face's tokenizers.

    An unknown character raises an error there too, unless the vocabulary has an unknown symbol.
    """
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
            # The empty text is not a character, so the vocabulary never has it.
            "unk_token": "" if tokenizer.unknown_id is None else UNKNOWN,
        },
    }


def _dump(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
