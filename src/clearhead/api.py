"""What users call: `build`, `load`, `export`, `presets`. What they get is a `Model`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from clearhead.config import Spec
from clearhead.errors import did_you_mean, require
from clearhead.fast.form import form_of
from clearhead.generate.transcribe import speech_files
from clearhead.layers.sound import SoundEmbedding
from clearhead.model import Model
from clearhead.models.base import EncoderDecoder
from clearhead.models.family import FamilyConfig, family
from clearhead.models.heads import PoolingConfig
from clearhead.models.hf import OUR_LAYOUT
from clearhead.models.presets import PRESETS, Preset, resolve
from clearhead.paths import looks_like_path
from clearhead.sources import open_with_head
from clearhead.text.foreign import gguf_metadata
from clearhead.weights.folder import CONFIG, OWN_FILES, WEIGHTS, refuse_full, whole_folder
from clearhead.weights.gguf import check_family, export_gguf
from clearhead.weights.hf import to_hf
from clearhead.weights.hub import fetch
from clearhead.weights.onnx import export_onnx

Target = Literal["hf", "onnx", "gguf"]


def build(
    name: str | FamilyConfig,
    /,
    *,
    seed: int | None = None,
    device: str | None = None,
    **changes: Any,
) -> Model:
    """A new model from a family, a preset or settings, with some of them changed.

    `build("gpt2", n_layers=4, d_model=128, n_heads=4, vocab_size=65)`. With device="meta" nothing
    is allocated.
    """
    config = resolve(name) if isinstance(name, str) else name
    require(
        isinstance(config, Spec), f"build takes the name of a model or its settings, not {name!r}."
    )
    config = config.changed(**changes) if changes else config
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    if device == "meta":
        return Model(config.outline(), config)
    with torch.device("cpu"):
        net = config.build(generator)
    return Model(net if device is None else net.to(device), config)


def load(
    source: str | Path,
    *,
    head: Any = None,
    labels: Sequence[str] | None = None,
    seed: int | None = None,
    revision: str | None = None,
    report: bool = False,
) -> Any:
    """A model, ready to run, from what people have:

    a folder that `save` wrote, a run's folder, a Hugging Face folder or hub name, a GGUF file, an
    official Whisper .pt, a llama2.c .bin. `revision` is the hub's. With `report` it returns (model,
    report): what became of every foreign key.

    `head` puts another head on the body: `head="classification", labels=["bad", "good"]`, or "none"
    for the bare states. What the model does not have of it is drawn from `seed`.
    """
    path = Path(source).expanduser()
    if not path.exists() and not looks_like_path(str(source)):
        path = fetch(str(source), revision)
    model, said = open_with_head(path, head, labels, seed)
    return (model, said) if report else model


def export(
    model: Model,
    folder: str | Path,
    to: Target = "hf",
    dtype: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model for others, whole or not at all; over something that is there only with
    `overwrite`.

    "hf": a folder that transformers opens; "onnx": with and without cache, dynamic batch and
    length; "gguf": one file for llama.cpp, its matrices in `dtype` f32, f16 or q8_0.
    """
    targets = ("hf", "onnx", "gguf")
    require(
        to in targets,
        f'There is no export to "{to}".{did_you_mean(str(to), targets)} Known: hf, onnx, gguf.',
    )
    require(
        dtype is None or to == "gguf", f"dtype is a setting of GGUF files, not of {to} folders."
    )
    form = form_of(model.net)
    require(
        form in (None, "fp32"),
        f"This model's weights are {form} of our own kind, which others do not read: export the "
        "model that they were made from.",
    )
    model.net.retie()
    if to == "gguf":
        check_family(model.config)
    refuse_full(folder, overwrite)
    if to == "hf":
        _export_hf(model, folder)
    elif to == "onnx":
        export_onnx(model.net, model.config, folder, model.tokenizer)
    else:
        words = None
        if model.tokenizer is not None:
            words = gguf_metadata(model.tokenizer, model.config.vocab_size)
        export_gguf(model.net, model.config, words, folder, dtype or "f16")  # type: ignore[arg-type]


def _export_hf(model: Model, folder: str | Path) -> None:
    hf, tensors = to_hf(model.net, model.config)
    hf |= {"dtype": str(next(model.net.parameters()).dtype).removeprefix("torch.")}
    ids = _special_ids(model)
    for name in getattr(family(model.config.kind), "FIXED_IDS", ()):
        require(
            ids.get(name, hf[name]) == hf[name],
            f"In transformers' {model.config.kind} {name} is {hf[name]}, which fixes positions; "
            f"this tokeniser has {ids.get(name)}. {OUR_LAYOUT}",
        )
    hf |= ids
    if labels := model.labels:
        hf |= {
            "id2label": dict(enumerate(labels)),
            "label2id": {n: i for i, n in enumerate(labels)},
        }
    with whole_folder(folder, OWN_FILES) as new:
        save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        model.write_companions(new)
        for name, said in _speech_files(model).items():
            (new / name).write_text(json.dumps(said, indent=2) + "\n")
        head = getattr(model.config, "head", None)
        if isinstance(head, PoolingConfig) and not head.dense:
            _write_sentence_modules(new, head, model.config)
        (new / CONFIG).write_text(json.dumps(hf, indent=2) + "\n")


def _speech_files(model: Model) -> dict[str, Any]:
    """What transformers needs to listen with a model, under what came along with it."""
    net = model.net
    if not isinstance(net, EncoderDecoder) or not isinstance(net.encoder.embed, SoundEmbedding):
        return {}
    made = speech_files(model.config, model.tokenizer)
    return {name: said | model.companions.get(name, {}) for name, said in made.items()}


def _special_ids(model: Model) -> dict[str, Any]:
    """The ids that transformers wants in config.json, as far as they are known."""
    said = model.companions.get("generation_config.json", {})
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    ids = {name: said[name] for name in names if said.get(name) is not None}
    tokenizer = model.tokenizer
    if tokenizer is not None:
        own = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
        ids = {f"{role}_token_id": id for role, id in own.items() if id is not None} | ids
        if isinstance(model.net, EncoderDecoder) and tokenizer.pad_id is not None:
            ids.setdefault("decoder_start_token_id", tokenizer.pad_id)
    return ids


def _write_sentence_modules(folder: Path, head: PoolingConfig, config: Any) -> None:
    """What sentence-transformers needs beside the body: the pooling, and whether to normalise."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if head.normalise else [])]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    modes = {"first": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "last": "lasttoken"}
    mode = head.mode or "first"
    pooling = {"word_embedding_dimension": config.d_model}
    pooling |= {f"pooling_mode_{theirs}": ours == mode for ours, theirs in modes.items()}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / CONFIG).write_text(json.dumps(pooling, indent=2) + "\n")
    if head.normalise:
        (folder / "2_Normalize").mkdir()
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")


def presets() -> dict[str, Preset]:
    """The published models that `build` knows by name."""
    return dict(PRESETS)
