"""ONNX: a network as graphs that onnxruntime and its like run without Python.

    encoder          model.onnx              ids, mask (types) | pixels -> states | vector | logits
    decoder          model.onnx              ids -> logits
                     decoder_with_past.onnx  ids, past_key_values.* -> logits, present.*
    encoder-decoder  encoder.onnx            ids, mask | mel -> states, cross.*
                     decoder.onnx            ids, states, source_mask -> logits
                     decoder_with_past.onnx  ids, source_mask, cross.*, past_key_values.*
                                               -> logits, present.*
    two-tower        text.onnx, image.onnx   ids, mask | pixels -> vector (of length 1)

Batch and lengths are free in every file. `mask` is 1 where there is a token and 0 where there is
none, on either side. `past_key_values.{i}.key` and `.value` are [batch, kv_heads, past, head_dim]
of layer i, all of the past even where a window would forget it; `past` may be 0, and what comes out
as `present.*` is the next call's past. The source's keys and values (`cross.*`) are projected once,
by the encoder's file, and not again in every step. Rows with a past are of equal length.

A network is traced with symbols for its lengths, so nothing may be decided by a length. Hence the
positions here claim to have holes: then the masks are computed, and not guessed from facts. The
fused kernel is replaced by its slow twin, because ONNX's own form of it gives no zeros for a row
with nothing to attend to.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.attention.cache import KV, Cache, CrossKV
from clearhead.attention.positions import Positions
from clearhead.attention.softmax import Kernel, Softmax
from clearhead.attention.view import View
from clearhead.errors import ClearheadError, require
from clearhead.fast.products import drop_compiled
from clearhead.layers.embed import Embedding
from clearhead.layers.patch import PatchEmbedding
from clearhead.layers.position import Learned, Learned2D
from clearhead.layers.recurrent import RecurrentStack
from clearhead.layers.sound import SoundEmbedding
from clearhead.layers.stack import Memory, Stack
from clearhead.models.base import Decoder, Encoder, EncoderDecoder, Net
from clearhead.models.clip import TwoTowers
from clearhead.models.family import FamilyConfig
from clearhead.models.heads import LMHead, PoolingHead
from clearhead.tap import taps
from clearhead.weights.folder import CONFIG, FORMAT, whole_folder

OPSET = 20
ONE_FILE = 1_500_000_000
"""Weights of more bytes than this stand in a file of their own: protobuf ends at 2 GiB."""
SIZES = {"batch": 2, "length": 5, "past": 3, "source": 7, "frames": 12}
"""The lengths of the example a network is traced with: no two alike, and none 0 or 1, which a
tracer takes for special cases.
"""
FILES = ("model", "encoder", "decoder", "decoder_with_past", "text", "image")
BESIDE = (CONFIG, "tokenizer.json", "tokenizer_config.json", "target")


@dataclass(frozen=True)
class Input:
    """A tensor that a graph is given."""

    name: str
    """What it is called."""
    axes: tuple[str | int, ...]
    """Its axes: the name of one that is free, the size of one that is fixed."""
    dtype: torch.dtype = torch.int64
    """Its numbers."""

    def example(self) -> Tensor:
        """Some such tensor, to trace with."""
        shape = [SIZES[axis] if isinstance(axis, str) else axis for axis in self.axes]
        return torch.ones(shape, dtype=self.dtype)


@dataclass(frozen=True)
class Graph:
    """One file to write."""

    name: str
    """The file's name, without .onnx."""
    run: Callable[..., Any]
    """What it computes from the inputs."""
    inputs: tuple[Input, ...]
    """What it is given, in order."""
    outputs: tuple[str, ...]
    """What it gives back, in order."""


def export_onnx(
    net: Net, config: FamilyConfig, folder: str | Path, tokenizer: Any = None
) -> list[Path]:
    """Write a network's graphs with config.json and the tokenizer's files, all of them or none;
    returns what was written. The numbers are float32, whatever the network's.

    An encoder-decoder's loop: encoder.onnx once, then decoder_with_past.onnx for every token with
    `cross.*` as the encoder gave them. decoder.onnx has no past and is for scoring.
    """
    onnx = _libraries()
    require(
        not any(parameter.is_meta for parameter in net.parameters()),
        'A model on the meta device has no weights to export: build it without device="meta".',
    )
    folder, net = Path(folder), _plain_copy(net)
    graphs = _graphs(net)
    description = {"format": FORMAT, "family": config.kind, "config": config.to_dict()}
    known = {f"{name}.onnx{more}" for name in FILES for more in ("", ".data")} | set(BESIDE)
    with whole_folder(folder, known) as new:
        for graph in graphs:
            path = new / f"{graph.name}.onnx"
            _write(net, graph, path)
            onnx.checker.check_model(str(path), full_check=True)
        (new / CONFIG).write_text(json.dumps(description, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save(new)
    return sorted(path for path in folder.rglob("*") if path.is_file())


# -- which graphs


def _graphs(net: Net) -> list[Graph]:
    """The files of a network."""
    require(
        not any(isinstance(part, RecurrentStack) for part in net.modules()),
        "A recurrent network has no form in ONNX here: Transformers have. Save it with "
        "model.save(folder).",
    )
    if isinstance(net, TwoTowers):
        text, out = partial(_text, net.embed_text, net.text), ("vector",)
        return [
            Graph("text", text, _text_inputs(), out),
            Graph("image", net.embed_image, _pixels(net.image.embed), out),
        ]
    if isinstance(net, EncoderDecoder):
        return _seq2seq_graphs(net)
    if isinstance(net, Decoder) and (net.head is None or isinstance(net.head, LMHead)):
        past, present = _past(net.stack, "past_key_values", "past"), _names(net.stack, "present")
        out = (_output(net.head),)
        return [
            Graph("model", partial(_whole, net), (_IDS,), out),
            Graph("decoder_with_past", partial(_step, net), (_IDS, *past), (*out, *present)),
        ]
    if isinstance(net, (Encoder, Decoder)):
        out = (_output(net.head),)
        if isinstance(net.embed, PatchEmbedding):
            return [Graph("model", partial(net), _pixels(net.embed), out)]
        if isinstance(net.embed, Embedding):
            types, inputs = net.embed.types, _text_inputs()
            if types is not None and types.num_embeddings > 1:
                inputs = (*inputs, Input("types", _IDS.axes))
            return [Graph("model", partial(_text, net, net), inputs, out)]
    raise ClearheadError(
        f"A {type(net).__name__} has no form in ONNX here: encoders of text and images, decoders, "
        "encoder-decoders and two-tower models have. Save it, or export it to another format."
    )


def _seq2seq_graphs(net: EncoderDecoder) -> list[Graph]:
    embed, stack = net.encoder.embed, net.decoder.stack
    source, run = _text_inputs("source"), partial(_text_states, net)
    if isinstance(embed, SoundEmbedding):
        source = (Input("mel", ("batch", embed.n_mels, "frames"), torch.float32),)
        run = partial(_sound_states, net)
    width = stack.blocks[0].cross_attn.k_proj.in_features
    states = Input("states", ("batch", "source", width), torch.float32)
    mask = Input("source_mask", ("batch", "source"))
    cross, past = _past(stack, "cross", "source"), _past(stack, "past_key_values", "past")
    present = _names(stack, "present")
    return [
        Graph("encoder", run, source, ("states", *_names(stack, "cross"))),
        Graph("decoder", partial(_target, net), (_IDS, states, mask), ("logits",)),
        Graph(
            "decoder_with_past",
            partial(_target_step, net),
            (_IDS, mask, *cross, *past),
            ("logits", *present),
        ),
    ]


_IDS = Input("ids", ("batch", "length"))


def _text_inputs(length: str = "length") -> tuple[Input, ...]:
    return Input("ids", ("batch", length)), Input("mask", ("batch", length))


def _pixels(embed: PatchEmbedding) -> tuple[Input, ...]:
    size = embed.image_size
    return (Input("pixels", ("batch", embed.channels, size, size), torch.float32),)


def _names(stack: Stack, prefix: str) -> list[str]:
    layers = range(len(stack.blocks))
    return [f"{prefix}.{i}.{name}" for i in layers for name in ("key", "value")]


def _past(stack: Stack, prefix: str, axis: str) -> list[Input]:
    """The keys and values of every layer: of its own past, or of the source."""
    names, inputs = _names(stack, prefix), []
    for i, block in enumerate(stack.blocks):
        attn = block.cross_attn if axis == "source" else block.self_attn
        axes = ("batch", attn.n_kv_heads, axis, attn.head_dim)
        inputs += [Input(name, axes, torch.float32) for name in names[2 * i : 2 * i + 2]]
    return inputs


def _output(head: nn.Module | None) -> str:
    if head is None:
        return "states"
    return "vector" if isinstance(head, PoolingHead) else "logits"


# -- what the graphs compute


class _Grown(KV):
    """One layer's keys and values: those given, and behind them those of this call."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.k, self.v = torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2)
        return self.k, self.v


class _Past(Cache):
    """A cache without slots: what was, as long as it was, and what is new behind it."""

    def __init__(
        self,
        decoder: Decoder,
        past: tuple[Tensor, ...],
        cross: tuple[Tensor, ...] = (),
        memory: Memory | None = None,
    ) -> None:
        # Not Cache.__init__: a tuple with an entry a row would fix the number of rows.
        self.embed, self.n_kinds = decoder.embed, len(decoder.stack.kinds)
        self.before = past[0].shape[2]
        self.grown = [_Grown(k, v) for k, v in _pairs(past)]
        self.states = list(self.grown)
        self.cross = []
        for k, v in _pairs(cross):
            state = CrossKV()
            state.k, state.v = k, v
            self.cross.append(state)
        self.memory = memory

    @property
    def rows(self) -> int:
        return self.grown[0].k.shape[0]

    def next(self, length: int, device: torch.device | str | None = None) -> Positions:
        return _span(self.embed, self.before, length, device)

    def begin(self, at: Positions, follow: bool = False) -> list[Positions]:
        keys = _span(self.embed, 0, self.before + at.length, at.pos.device)
        return [keys] * self.n_kinds

    def present(self) -> list[Tensor]:
        """Every layer's keys and values, this call's with them."""
        return [x for state in self.grown for x in (state.k, state.v)]


def _text(call: Any, net: Any, ids: Tensor, mask: Tensor, *types: Tensor) -> Tensor:
    return call(ids, _masked(net.embed, mask), *types)


def _whole(net: Decoder, ids: Tensor) -> Tensor:
    return net(ids, _span(net.embed, 0, ids.shape[1], ids.device))


def _step(net: Decoder, ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
    cache = _Past(net, past)
    return (net.decode(ids, cache=cache), *cache.present())


def _text_states(net: EncoderDecoder, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return _with_cross(net, net.encode(ids, _masked(net.encoder.embed, mask)))


def _sound_states(net: EncoderDecoder, mel: Tensor) -> tuple[Tensor, ...]:
    embed = net.encoder.embed
    # The same number as (frames + 1) // 2, in the form in which the convolution has it: a tracer
    # compares formulas.
    at = _span(embed, 0, (mel.shape[2] - 1) // 2 + 1, mel.device)
    return _with_cross(net, net.encode(mel, at))


def _with_cross(net: EncoderDecoder, memory: Memory) -> tuple[Tensor, ...]:
    """The source's states, and what each layer of the decoder makes of them."""
    view = View.across(memory.at)
    pairs = [b.cross_attn.keys_values(memory.x, view, None) for b in net.decoder.stack.blocks]
    return (memory.x, *(x for pair in pairs for x in pair))


def _target(net: EncoderDecoder, ids: Tensor, states: Tensor, mask: Tensor) -> Tensor:
    at = _span(net.decoder.embed, 0, ids.shape[1], ids.device)
    return net.decode(ids, Memory(states, _masked(net.encoder.embed, mask)), at)


def _target_step(
    net: EncoderDecoder, ids: Tensor, mask: Tensor, *given: Tensor
) -> tuple[Tensor, ...]:
    cross, past = given[: len(given) // 2], given[len(given) // 2 :]
    # The keys and values are there, so of the states nothing is read but how many rows they have.
    memory = Memory(cross[0][:, 0], _masked(net.encoder.embed, mask))
    cache = _Past(net.decoder, past, cross, memory)
    return (net.decode(ids, cache=cache), *cache.present())


def _pairs(tensors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(tensors[::2], tensors[1::2], strict=True)


def _span(embed: Any, start: int, length: int, device: torch.device | str | None) -> Positions:
    """start, start + 1, ..., about which nothing is claimed that a mask could decide by."""
    pos = torch.arange(start, start + length, device=device).unsqueeze(0)
    return Positions(pos, start, _last(embed, start + length), dense=False, holes=True)


def _masked(embed: Any, mask: Tensor) -> Positions:
    """0, 1, 2, ... where the mask is 1, and nothing where it is 0."""
    pos = mask.cumsum(dim=1) * mask - 1
    return Positions(pos, 0, _last(embed, mask.shape[1]), dense=False, holes=True)


def _last(embed: Any, end: int) -> int:
    """The last position before `end`; with a learned table the last of the table, whose check would
    otherwise bind the lengths. (A runtime refuses to look behind the table's end by itself.)
    """
    table = getattr(embed, "position", None)
    if isinstance(table, Learned):
        return table.max_len - 1
    if isinstance(table, Learned2D):
        return table.first + table.row_table.num_embeddings * table.columns - 1
    return end - 1


# -- tracing and writing


class _Call(nn.Module):
    """A graph's function as a module that owns the network's parameters."""

    def __init__(self, net: Net, run: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.run = net, run

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(*inputs)


def _write(net: Net, graph: Graph, path: Path) -> None:
    """Trace a graph and write its file (two files if it is large)."""
    axes = {axis for given in graph.inputs for axis in given.axes if isinstance(axis, str)}
    free = {axis: torch.export.Dim(axis) for axis in axes}
    if "frames" in free:  # as many for each state, or the tracer cannot tell that two lengths agree
        free["frames"] = 2 * torch.export.Dim("source")
    shapes = tuple(
        {i: free[axis] for i, axis in enumerate(given.axes) if isinstance(axis, str)}
        for given in graph.inputs
    )
    inputs = tuple(given.example() for given in graph.inputs)
    with _quiet(), torch.no_grad():
        try:
            # Here and not in torch.onnx.export, which fixes a length where it cannot stay free.
            traced = torch.export.export(
                _Call(net, graph.run).eval(), inputs, dynamic_shapes=(shapes,), strict=False
            )
            program: Any = torch.onnx.export(
                traced,
                input_names=[given.name for given in graph.inputs],
                output_names=list(graph.outputs),
                dynamic_shapes=(shapes,),  # for the names of the axes
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
        except Exception as error:
            reason = " ".join(str(error.__cause__ or error).split())[:300]
            raise ClearheadError(
                f"{path.name} cannot be written, because a part of this model has no form in ONNX "
                f"that is right for every length: {reason} ... Build the model with the "
                '"softmax" kernel, and with masks that need no data of the call.'
            ) from error
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # the lines of code it came from, with this machine's paths
        program.save(path, external_data=_nbytes(net) > ONE_FILE)


def _nbytes(net: Net) -> int:
    return sum(parameter.nbytes for parameter in net.parameters())


def _plain_copy(net: Net) -> Net:
    """The network on the CPU, in float32, for inference, with nobody listening, and the slow twin
    in the place of every fused kernel.
    """
    net = copy.deepcopy(net).to("cpu", torch.float32).eval()
    drop_compiled(net)
    for tap in taps(net).values():
        tap.listeners = ()
    for kernel in net.modules():
        if type(kernel) is Softmax:
            kernel.forward = partial(Kernel.forward, kernel)  # type: ignore[method-assign]
    return net


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says about itself: nothing that a user could mend."""
    log = logging.getLogger("torch.onnx._internal.exporter._registration")  # no torchvision
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            warnings.filterwarnings("ignore", message="# The axis name", category=UserWarning)
            yield
    finally:
        log.setLevel(level)


def _libraries() -> Any:
    """The module onnx; the exporter itself asks for onnxscript."""
    try:
        importlib.import_module("onnxscript")
        return importlib.import_module("onnx")
    except ImportError as error:
        raise ClearheadError(
            f"Export to ONNX needs a package that is not installed ({error.name}): "
            "pip install 'clearhead[export]'."
        ) from error
