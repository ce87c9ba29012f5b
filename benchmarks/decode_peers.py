"""Who does the work of decode.py: ours, and the engines of others from the files that we export."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from decode_models import Contender, Work, quiet_transformers
from torch import Tensor, nn
from train_step import fill, load_nanogpt, named

import clearhead as ch
from clearhead.fast.form import step_bytes
from clearhead.models import bert, gpt2
from clearhead.weights.convert import to_theirs

BATCH = 32  # sentences that an encoder of others is given at once, as ours takes them
# Bytes a weight; q8_0 has a scale of 16 bits for 32 of them.
BYTES = {"fp32": 4.0, "f32": 4.0, "f16": 2.0, "int8": 1.0, "q8_0": 34 / 32}


# --- ours ---


def own_decoder(work: Work, form: Any = "fp32") -> Contender:
    """`model.generate` as it is, in a form of the weights; fp32 it takes by itself."""
    model = work.model if form == "fp32" else work.model.fast(form)
    return Contender(
        lambda: model.generate(work.texts, max_new_tokens=work.new),
        work.encode,
        lambda: step_bytes(model._quick(model.net)),
    )


def own_translator(work: Work, beams: int) -> Contender:
    """`model.translate` as it is."""
    model, new = work.model, work.new
    return Contender(
        lambda: model.translate(work.texts, beams=beams, max_new_tokens=new), work.encode
    )


def own_encoder(work: Work) -> Contender:
    """`model.embed` as it is; it cuts the texts into tokens, too, and sorts them."""
    return Contender(lambda: work.model.embed(work.texts), same)


def same(output: Any) -> Any:
    """What needs no reading."""
    return output


# --- decoders of others ---


def transformers_decoder(work: Work) -> Contender:
    """`generate` of GPT2LMHeadModel as it ships, with its cache."""
    net = quiet_transformers().GPT2LMHeadModel.from_pretrained(work.hf).eval()
    return _generate(net, work, len(work.rows[0]))


def transformers_translator(work: Work, beams: int) -> Contender:
    """`generate` of MarianMTModel; nothing is forced at the end."""
    net = quiet_transformers().MarianMTModel.from_pretrained(work.hf).eval()
    net.generation_config.forced_eos_token_id = None
    return _generate(net, work, 1, num_beams=beams, length_penalty=1.0)


def _generate(net: Any, work: Work, skipped: int, **settings: Any) -> Contender:
    ids = torch.tensor(work.rows)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    settings |= {"max_new_tokens": work.new, "do_sample": False}

    def run() -> Any:
        with torch.inference_mode():
            return net.generate(**given, **settings)

    return Contender(run, lambda out: out[:, skipped:].tolist(), BYTES["fp32"] * work.weights)


def nanogpt_decoder(work: Work) -> Contender:
    """nanoGPT, which has no cache; with GPT-2's GELU, so that its tokens can be compared."""
    if work.nanogpt is None:
        raise FileNotFoundError("--nanogpt names no checkout of it")
    module, config = load_nanogpt(work.nanogpt), work.model.config
    assert isinstance(config, gpt2.Config)
    settings = module.GPTConfig(
        block_size=config.max_len,
        vocab_size=config.vocab_size,
        n_layer=config.n_layers,
        n_head=config.n_heads,
        n_embd=config.d_model,
        dropout=0.0,
        bias=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # it announces its parameters
        net = module.GPT(settings).eval()
    theirs = to_theirs(named(work.model.net), gpt2.keys(config), config.n_layers)
    fill(net, {name: w.T if ".c_" in name and w.dim() == 2 else w for name, w in theirs.items()})
    for block in net.transformer.h:
        block.mlp.gelu = nn.GELU(approximate="tanh")
    ids = torch.tensor(work.rows)
    return Contender(
        lambda: net.generate(ids, work.new, top_k=1),
        lambda out: out[:, ids.shape[1] :].tolist(),
        BYTES["fp32"] * work.weights,
    )


def llama_cpp(work: Work, kind: str) -> Contender:
    """llama.cpp through xllamacpp: the prompt is read anew every time, and only the best token is
    looked for.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(work.gguf(kind))
    params.n_ctx, params.n_parallel = len(work.rows[0]) + work.new + 8, 1
    params.n_gpu_layers, params.port, params.verbosity = 0, 0, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = work.threads
    server = xllamacpp.Server(params)
    greedy = {"temperature": 0, "top_k": 1, "samplers": ["top_k"]}
    ask = greedy | {"prompt": work.rows[0], "n_predict": work.new, "cache_prompt": False}

    def read(answer: Any) -> Any:
        return work.encode([answer["choices"][0]["text"]])

    return Contender(lambda: server.handle_completions(ask), read, BYTES[kind] * work.weights)


# --- CTranslate2 ---


def ct2_settings(work: Work, form: str, workers: bool) -> dict[str, Any]:
    """One worker with all threads, or a worker for every thread (better for many rows)."""
    inter, intra = (work.threads, 1) if workers else (1, work.threads)
    kind = {"fp32": "float32"}.get(form, form)
    return {"compute_type": kind, "inter_threads": inter, "intra_threads": intra}


def share_of_rows(work: Work, workers: bool) -> int:
    """How many rows a worker takes at once; 0: all."""
    return -(-len(work.rows) // work.threads) if workers else 0


def ct2_decoder(work: Work, form: str, workers: bool = False) -> Contender:
    """CTranslate2's Generator, which reads the prompt at once if it need not be in the result."""
    import ctranslate2

    engine = ctranslate2.Generator(str(work.ct2), **ct2_settings(work, form, workers))
    prompts = [[work.tokenizer.token(id) for id in row] for row in work.rows]
    settings = {
        "max_length": work.new,
        "beam_size": 1,
        "sampling_topk": 1,
        "include_prompt_in_result": False,
        "max_batch_size": share_of_rows(work, workers),
    }
    return Contender(
        lambda: engine.generate_batch(prompts, **settings),
        lambda found: [one.sequences_ids[0] for one in found],
        BYTES[form] * work.weights,
    )


def ct2_translator(work: Work, beams: int, workers: bool) -> Contender:
    """CTranslate2's Translator."""
    import ctranslate2

    engine = ctranslate2.Translator(str(work.ct2), **ct2_settings(work, "fp32", workers))
    sources = [[work.tokenizer.token(id) for id in row] for row in work.rows]
    settings = {
        "max_decoding_length": work.new,
        "beam_size": beams,
        "max_batch_size": share_of_rows(work, workers),
    }

    def read(found: Any) -> Any:
        return [[work.tokenizer.id(token) for token in one.hypotheses[0]] for one in found]

    return Contender(lambda: engine.translate_batch(sources, **settings), read)


def ct2_encoder(work: Work, workers: bool) -> Contender:
    """CTranslate2's Encoder, with sentences of similar length together."""
    import ctranslate2

    engine = ctranslate2.Encoder(str(work.ct2), **ct2_settings(work, "fp32", workers))
    pool = ThreadPoolExecutor(work.threads if workers else 1)

    def encode(chosen: list[int], ids: Tensor, mask: Tensor) -> Tensor:
        found = engine.forward_batch([work.rows[i] for i in chosen])
        return pooled(torch.from_numpy(np.array(found.last_hidden_state)), mask)

    return Contender(lambda: in_batches(work, encode, True, pool), same)


# --- encoders of others ---


def transformers_encoder(work: Work, ordered: bool) -> Contender:
    """BertModel as it ships, in batches as the sentences come or sorted by length."""
    loaded = quiet_transformers().BertModel
    net = loaded.from_pretrained(work.hf, add_pooling_layer=False).eval()

    def encode(_: list[int], ids: Tensor, mask: Tensor) -> Tensor:
        with torch.inference_mode():
            return pooled(net(input_ids=ids, attention_mask=mask).last_hidden_state, mask)

    return Contender(lambda: in_batches(work, encode, ordered), same)


def onnx_encoder(work: Work, fused: bool) -> Contender:
    """onnxruntime, in batches sorted by length: on transformers' graph with its own fusions for
    BERT, or on the graph that we export.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = work.threads, 1
    path = str(fused_graph(work) if fused else own_graph(work))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    segments = any(given.name == "types" for given in session.get_inputs())

    def encode(_: list[int], ids: Tensor, mask: Tensor) -> Tensor:
        given = {"ids": ids.numpy(), "mask": mask.numpy()}
        if segments:
            given["types"] = np.zeros_like(given["ids"])
        found = torch.from_numpy(session.run(None, given)[0])
        return pooled(found, mask) if found.dim() == 3 else found

    return Contender(lambda: in_batches(work, encode, True), same)


def own_graph(work: Work) -> Path:
    """Ours, whose output is the vectors."""
    ch.export(work.model, work.folder / "onnx", to="onnx")
    return work.folder / "onnx" / "model.onnx"


def fused_graph(work: Work) -> Path:
    """BertModel's, whose output is the states. The fusions know the eager form of attention, as
    the older exporter writes it.
    """
    from onnxruntime.transformers import optimizer

    loaded, settings = quiet_transformers().BertModel, work.model.config
    assert isinstance(settings, bert.Config)
    net = loaded.from_pretrained(work.hf, add_pooling_layer=False, attn_implementation="eager")
    rows, free = torch.ones(2, 5, dtype=torch.long), {0: "batch", 1: "length"}
    names: dict[str, Any] = {"input_names": ["ids", "mask"], "output_names": ["states"]}
    axes = {"ids": free, "mask": free, "states": free}
    path = work.folder / "bert.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            States(net.eval()), (rows, rows), str(path), dynamic_axes=axes, dynamo=False, **names
        )
    sizes = {"num_heads": settings.n_heads, "hidden_size": settings.d_model}
    made = optimizer.optimize_model(str(path), model_type="bert", **sizes)
    done = made.get_fused_operator_statistics()
    assert done["Attention"] == settings.n_layers, f"attention was not fused: {done}"
    made.save_model_to_file(str(work.folder / "fused.onnx"))
    return work.folder / "fused.onnx"


class States(nn.Module):
    """An encoder of transformers with its states as the only output."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The states."""
        return self.net(input_ids=ids, attention_mask=mask).last_hidden_state


def in_batches(
    work: Work,
    encode: Callable[[list[int], Tensor, Tensor], Tensor],
    ordered: bool,
    pool: ThreadPoolExecutor | None = None,
) -> Tensor:
    """The vectors of all sentences, in the order given."""
    order = list(range(len(work.rows)))
    if ordered:
        order.sort(key=lambda i: len(work.rows[i]))
    parts = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]

    def one(chosen: list[int]) -> Tensor:
        rows = [torch.tensor(work.rows[i]) for i in chosen]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        at = torch.arange(ids.shape[1])
        return encode(chosen, ids, (at < torch.tensor([[len(row)] for row in rows])).long())

    found = torch.cat(list(map(one, parts) if pool is None else pool.map(one, parts)))
    return found[torch.tensor(order).argsort()]


def pooled(states: Tensor, mask: Tensor) -> Tensor:
    """The mean of the states of a sentence, of length 1."""
    weights = mask.unsqueeze(-1).to(states.dtype)
    return F.normalize((states * weights).sum(dim=1) / weights.sum(dim=1), dim=-1)
