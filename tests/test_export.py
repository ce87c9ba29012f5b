"""Models built here, written for others.

Opened with equal outputs where there is such an architecture, refused before anything is written
where there is none.

What came from a file and goes back is in `test_battery.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import clearhead as ch
from clearhead.errors import ClearheadError
from clearhead.text.trained import train_tokenizer
from clearhead.weights import folder as folders
from clearhead.weights.hf import lacks_pooler
from tiny import SIZES, VOCAB, noisy, tokens

transformers.utils.logging.disable_progress_bar()

PIXELS = {"image_size": 16, "patch_size": 4}
TOWER = {"d_model": 16, "n_layers": 2, "n_heads": 4, "d_ff": 24}
STREAM = {"d_model": 16, "n_layers": 2, "n_heads": 4}
GATED = {"kind": "gated", "d_ff": 24, "activation": "gelu_tanh", "bias": False}
PLAIN = {"kind": "plain", "d_ff": 24, "activation": "relu", "bias": False}
LABELS = {"kind": "classification", "n_labels": 3}
TAGS = {"kind": "tagging", "n_labels": 3}
POOLER = {"kind": "pooling", "mode": "first", "dense": True}
MEAN = {"kind": "pooling", "mode": "mean"}


def built(family: str, **changes: Any) -> ch.Model:
    """A tiny model, its weights shaken."""
    sizes: dict[str, Any] = SIZES | {"dropout": 0.0}
    if family == "vit":
        sizes = STREAM | PIXELS
    if family == "clip":
        sizes = PIXELS | {"vocab_size": VOCAB, "max_len": 20, "width": 12}
        sizes |= {"text": TOWER, "image": TOWER | {"n_layers": 3}}
    if family == "whisper":
        sizes |= {"n_mels": 8, "source_len": 10}
    if family == "t5":
        sizes |= {"ffn": PLAIN}
    model = ch.build(family, seed=0, **sizes | changes)
    noisy(model.net, 0.1 if family == "t5" else 0.3)
    return model


def inputs(model: ch.Model) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
    """The same in their words and in ours; no id stands for padding or an end by accident."""
    kind, shape = model.config.kind, model.config.shape
    ids, target = tokens(2, 11).clamp(3, VOCAB - 3), tokens(2, 7, seed=2).clamp(3, VOCAB - 3)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    if kind == "vit":
        return {"pixel_values": pixels}, (pixels,)
    if kind == "clip":
        ids[:, -1] = VOCAB - 1
        return {"input_ids": ids, "pixel_values": pixels}, (ids, pixels)
    if kind == "whisper":
        mel = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(3))
        return {"input_features": mel, "decoder_input_ids": target}, (mel, target)
    if shape == "encoder-decoder":
        return {"input_ids": ids, "decoder_input_ids": target}, (ids, target)
    if getattr(model.config.head, "kind", "") == "classification" and shape == "decoder":
        return {"input_ids": ids[:1]}, (ids[:1],)  # theirs needs to know padding for more
    return {"input_ids": ids}, (ids,)


def theirs(out: Any, model: ch.Model) -> torch.Tensor:
    if "start_logits" in out:
        return torch.stack((out.start_logits, out.end_logits), dim=-1)
    for name in ("logits", "logits_per_text"):
        if name in out:
            return out[name]
    head = model.config.head
    return out.last_hidden_state if head is None else out.pooler_output


def opened(folder: Path, missing: tuple[str, ...] = ()) -> transformers.PreTrainedModel:
    """What transformers makes of a folder: the architecture it names, every weight in its place."""
    said = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, said["architectures"][0])
    hf, info = kind.from_pretrained(folder, output_loading_info=True)
    assert set(info.pop("missing_keys")) == set(missing)
    assert not any(info.values()), info
    return hf.eval()


def assert_equal_outputs(model: ch.Model, hf: transformers.PreTrainedModel) -> None:
    by_name, in_order = inputs(model)
    with torch.no_grad():
        expected, got = model(*in_order), theirs(hf(**by_name), model)
    assert expected.std() > 0.01
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


POOLER_KEYS = ("pooler.dense.bias", "pooler.dense.weight")
EXPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("gpt2", {}, "GPT2LMHeadModel"),
    "gpt2 untied": ("gpt2", {"head": {"kind": "lm", "tied": False}}, "GPT2LMHeadModel"),
    "gpt2 relu, own width": ("gpt2", {"activation": "relu", "d_ff": 40}, "GPT2LMHeadModel"),
    "gpt2 labels": ("gpt2", {"head": LABELS}, "GPT2ForSequenceClassification"),
    "gpt2 tags": ("gpt2", {"head": TAGS}, "GPT2ForTokenClassification"),
    "gpt2 span": ("gpt2", {"head": "span"}, "GPT2ForQuestionAnswering"),
    "gpt2 states": ("gpt2", {"head": None}, "GPT2Model"),
    "llama": ("llama", {}, "LlamaForCausalLM"),
    "llama groups": ("llama", {"n_kv_heads": 2, "d_ff": 40}, "LlamaForCausalLM"),
    "llama tied": ("llama", {"head": {"kind": "lm", "tied": True}}, "LlamaForCausalLM"),
    "llama wide heads": ("llama", {"variant": {"head_dim": 8}}, "LlamaForCausalLM"),
    "llama theta": ("llama", {"position": {"kind": "rope", "theta": 500.0}}, "LlamaForCausalLM"),
    "llama window": ("llama", {"variant": {"window": 4}}, "MistralForCausalLM"),
    "llama window labels": (
        "llama",
        {"variant": {"window": 4}, "head": LABELS},
        "MistralForSequenceClassification",
    ),
    "llama biases": ("llama", {"variant": {"qkv_bias": True}}, "Qwen2ForCausalLM"),
    "llama biases tags": (
        "llama",
        {"variant": {"qkv_bias": True}, "head": TAGS},
        "Qwen2ForTokenClassification",
    ),
    "llama all biases": (
        "llama",
        {"variant": {"qkv_bias": True, "out_bias": True, "ffn_bias": True}},
        "LlamaForCausalLM",
    ),
    "llama norms": ("llama", {"variant": {"qk_norm": True}}, "Qwen3ForCausalLM"),
    "llama norms states": ("llama", {"variant": {"qk_norm": True}, "head": None}, "Qwen3Model"),
    "llama gelu": ("llama", {"variant": {"activation": "gelu_tanh"}}, "LlamaForCausalLM"),
    "neox": ("gpt_neox", {"position": {"kind": "rope", "fraction": 0.5}}, "GPTNeoXForCausalLM"),
    "neox in sequence": (
        "gpt_neox",
        {"topology": "sequence", "position": {"kind": "rope", "fraction": 1.0}},
        "GPTNeoXForCausalLM",
    ),
    "bert": ("bert", {}, "BertForMaskedLM"),
    "bert labels": ("bert", {"head": LABELS}, "BertForSequenceClassification"),
    "bert pooler": ("bert", {"head": POOLER}, "BertModel"),
    "bert states": ("bert", {"head": None}, "BertModel"),
    "roberta": ("roberta", {}, "RobertaForMaskedLM"),
    "roberta tags": ("roberta", {"head": TAGS}, "RobertaForTokenClassification"),
    "distilbert": ("distilbert", {"head": "masked_lm"}, "DistilBertForMaskedLM"),
    "distilbert span": ("distilbert", {"head": "span"}, "DistilBertForQuestionAnswering"),
    "t5": ("t5", {}, "T5ForConditionalGeneration"),
    "t5 gelu": ("t5", {"ffn": PLAIN | {"activation": "gelu"}}, "T5ForConditionalGeneration"),
    "t5 gated": ("t5", {"ffn": GATED, "head_dim": 6}, "T5ForConditionalGeneration"),
    "t5 gated silu": ("t5", {"ffn": GATED | {"activation": "silu"}}, "T5ForConditionalGeneration"),
    "t5 untied": (
        "t5",
        {"ffn": GATED, "head": {"kind": "t5_lm", "tied": False, "scaled": False}},
        "T5ForConditionalGeneration",
    ),
    "t5 untied, scaled": (
        "t5",
        {"head": {"kind": "t5_lm", "tied": False, "scaled": True}},
        "T5ForConditionalGeneration",
    ),
    "t5 tied, not scaled": (
        "t5",
        {"head": {"kind": "t5_lm", "tied": True, "scaled": False}},
        "T5ForConditionalGeneration",
    ),
    "bart": ("bart", {"n_decoder_layers": 3}, "BartForConditionalGeneration"),
    "bart scaled": ("bart", {"scaled": True}, "BartForConditionalGeneration"),
    "marian": (
        "bart",
        {"position": {"kind": "sinusoidal", "layout": "halves"}, "embed_norm": False},
        "MarianMTModel",
    ),
    "whisper": ("whisper", {"n_decoder_layers": 3}, "WhisperForConditionalGeneration"),
    "vit": ("vit", {"head": LABELS}, "ViTForImageClassification"),
    "vit without biases": ("vit", {"head": LABELS, "qkv_bias": False}, "ViTForImageClassification"),
    "clip": ("clip", {}, "CLIPModel"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPORTED)
def test_a_model_built_here_opens_in_transformers(name, tmp_path):
    family, changes, architecture = EXPORTED[name]
    model = built(family, **changes)
    ch.export(model, tmp_path / "out", to="hf")
    hf = opened(tmp_path / "out", POOLER_KEYS if name == "bert states" else ())
    assert type(hf).__name__ == architecture
    assert_equal_outputs(model, hf)
    again = ch.load(tmp_path / "out", head=POOLER if name == "bert pooler" else None)
    assert type(again.config) is type(model.config)
    ours, back = model.net.state_dict(), again.net.state_dict()
    assert ours.keys() == back.keys()
    assert all(tensor.equal(back[key]) for key, tensor in ours.items())
    by_order = inputs(model)[1]
    with torch.no_grad():
        assert again(*by_order).equal(model.net.eval()(*by_order))


def ntk(family: str) -> dict[str, Any]:
    scaling = {"kind": "ntk", "factor": 2.0}
    return {"position": {"kind": "rope", "scaling": scaling}} | (
        {"topology": "parallel"} if family == "gpt_neox" else {}
    )


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2 with rope": ("gpt2", {"position": "rope"}, "learned positions"),
    "gpt2 with sines": ("gpt2", {"position": "sinusoidal"}, "learned positions"),
    "gpt2 without positions": ("gpt2", {"position": None}, "learned positions"),
    "gpt2 with rms norm": ("gpt2", {"norm": "rms_norm"}, "LayerNorm"),
    "gpt2 without biases of norms": (
        "gpt2",
        {"norm": {"kind": "layer_norm", "bias": False}},
        "LayerNorm",
    ),
    "gpt2 with groups": ("gpt2", {"n_kv_heads": 2}, "one key/value head a query head"),
    "llama with window and norms": (
        "llama",
        {"variant": {"window": 4, "qk_norm": True}},
        "combines these choices: mistral, qwen3",
    ),
    "llama with biases and norms": (
        "llama",
        {"variant": {"qkv_bias": True, "qk_norm": True}},
        "combines these choices: qwen2, qwen3",
    ),
    "llama with an output bias alone": (
        "llama",
        {"variant": {"out_bias": True}},
        "out_bias without qkv_bias",
    ),
    "llama with a window and biases inside": (
        "llama",
        {"variant": {"window": 4, "ffn_bias": True}},
        "combines these choices: llama, mistral",
    ),
    "llama with alibi": ("llama", {"position": "alibi"}, "rotary positions"),
    "llama turned in part": (
        "llama",
        {"position": {"kind": "rope", "fraction": 0.5}},
        "rotary positions over the whole head",
    ),
    "llama with ntk": ("llama", ntk("llama"), '"ntk" has no name in transformers'),
    "neox with ntk": ("gpt_neox", ntk("gpt_neox"), "plain rotary positions"),
    "neox with alibi": ("gpt_neox", {"position": "alibi"}, "plain rotary positions"),
    "t5 with alibi": ("t5", {"position": "alibi"}, "positions in buckets"),
    "t5 with biases": ("t5", {"ffn": PLAIN | {"bias": True}}, "without bias vectors"),
    "t5 gated by the exact gelu": ("t5", {"ffn": GATED | {"activation": "gelu"}}, "GELU"),
    "the transformer of 2017": ("transformer", {}, "no architecture in transformers"),
    "bert with alibi": ("bert", {"position": "alibi"}, "learned positions and segments"),
    "bert without segments": ("bert", {"token_types": 0}, "learned positions and segments"),
    "bert with a pooler of means": ("bert", {"head": POOLER | {"mode": "mean"}}, "first token"),
    "bert whose pooler normalises": ("bert", {"head": POOLER | {"normalise": True}}, "first token"),
    "roberta with rope": ("roberta", {"position": "rope"}, "learned positions and segments"),
    "distilbert with segments": ("distilbert", {"token_types": 2}, "no segments"),
    "distilbert with a pooler": ("distilbert", {"head": POOLER}, "no pooler"),
    "bart with sines": ("bart", {"position": "sinusoidal"}, "another combination"),
    "marian with a norm": (
        "bart",
        {"position": {"kind": "sinusoidal", "layout": "halves"}},
        "another combination",
    ),
    "llama with the head span": ("llama", {"head": "span"}, r'the head "span" has no architecture'),
    "gpt2 with the head masked_lm": ("gpt2", {"head": "masked_lm"}, '"masked_lm" has no arch'),
    "gpt2 with the head pooling": ("gpt2", {"head": MEAN}, '"pooling" has no architecture'),
    "bert with the head lm": ("bert", {"head": "lm"}, '"lm" has no architecture'),
    "vit with the head tagging": ("vit", {"head": TAGS}, '"tagging" has no architecture'),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_architecture_is_refused_before_anything_is_written(name, tmp_path):
    family, changes, message = REFUSED[name]
    model = built(family, **changes)
    with pytest.raises(ClearheadError, match=message) as error:
        ch.export(model, tmp_path / "deep" / "out", to="hf")
    assert "model.save(folder)" in str(error.value)
    assert list(tmp_path.iterdir()) == []


# --- what goes along ---

TEXTS = ["the cat sat on the mat", "a dog and a cat", "what is a mat?"]


def with_words(family: str, **changes: Any) -> ch.Model:
    """A model with a tokeniser that was learnt here."""
    special = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
    words = train_tokenizer("words", TEXTS, special_tokens=special, template="<s> $A </s>")
    sizes = {} if family == "t5" else {"d_ff": 24}
    model = built(family, vocab_size=words.vocab_size, **sizes | changes)
    model.tokenizer = words
    return model


def test_the_tokeniser_goes_along(tmp_path):
    model = with_words("gpt2")
    model.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    ch.export(model, tmp_path / "out")
    hf = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in (*TEXTS, "an unknown word", ""):
        assert hf(text).input_ids == model.tokenizer.encode(text)
    assert (hf.bos_token, hf.eos_token, hf.pad_token, hf.unk_token) == (
        "<s>", "</s>", "<pad>", "<unk>",
    )  # fmt: skip
    said = [{"role": "user", "content": "a cat"}]
    assert hf.apply_chat_template(said, tokenize=False) == "a cat"
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    ids = model.tokenizer
    assert (config.bos_token_id, config.eos_token_id) == (ids.bos_id, ids.eos_id)
    again = ch.load(tmp_path / "out")
    assert again.tokenizer.encode(TEXTS[0]) == ids.encode(TEXTS[0])
    assert again.generate("the cat", max_new_tokens=5) == model.generate(
        "the cat", max_new_tokens=5
    )


def test_generation_settings_go_along(tmp_path):
    model = with_words("bart")
    said = {"max_length": 9, "num_beams": 1, "eos_token_id": [1, 2], "decoder_start_token_id": 3}
    model.companions["generation_config.json"] = said
    ch.export(model, tmp_path / "out")
    hf = opened(tmp_path / "out")
    assert hf.generation_config.max_length == 9
    assert hf.generation_config.eos_token_id == [1, 2]
    assert hf.generation_config.decoder_start_token_id == 3
    assert hf.config.decoder_start_token_id == 3
    assert ch.load(tmp_path / "out").companions["generation_config.json"].items() >= said.items()


def test_transformers_generates_what_we_do(tmp_path):
    model = with_words("gpt2")
    ch.export(model, tmp_path / "out")
    hf, words = (
        opened(tmp_path / "out"),
        transformers.AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    prompt = words("the cat", return_tensors="pt").input_ids
    mask = torch.ones_like(prompt)
    ids = hf.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)
    ids = ids[0, prompt.shape[1] :]
    expected = words.decode(ids, skip_special_tokens=True)
    assert model.generate("the cat", max_new_tokens=8).split() == expected.split()


def test_a_decoder_takes_what_the_tokeniser_gives(tmp_path):
    """`model(**tokenizer(text))`: GPT-2 would add vectors for segments, Llama would refuse them."""
    model = with_words("llama")
    ch.export(model, tmp_path / "out")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    given = words("the cat", return_tensors="pt")
    assert set(given) == {"input_ids", "attention_mask"}
    with torch.no_grad():
        out = opened(tmp_path / "out")(**given).logits
    torch.testing.assert_close(out, model(given["input_ids"]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_an_exported_translator_still_starts_with_the_same_token(family, tmp_path):
    model = with_words(family)
    assert model.tokenizer.pad_id == 1
    # Checked signatures hide from torch that decoding is a generator, so it is told here.
    with torch.inference_mode():
        expected = model.generate("the cat", max_new_tokens=6)
    ch.export(model, tmp_path / "out")
    assert opened(tmp_path / "out").config.decoder_start_token_id == 1
    with torch.inference_mode():
        assert ch.load(tmp_path / "out").generate("the cat", max_new_tokens=6) == expected


def test_a_roberta_whose_padding_is_another_token_is_refused(tmp_path):
    """Theirs counts the positions of what is not padding, from the id of padding on."""
    special = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}
    words = train_tokenizer("words", TEXTS, special_tokens=special, template="<s> $A </s>")
    model = built("roberta", vocab_size=words.vocab_size)
    model.tokenizer = words
    assert words.pad_id == 0
    with pytest.raises(ClearheadError, match="pad_token_id is 1"):
        ch.export(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_names_of_labels_go_along(tmp_path):
    hf = transformers.GPT2ForSequenceClassification(
        transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=4, n_positions=16, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, id2label={0: "bad", 1: "so so", 2: "good"},
        )
    )  # fmt: skip
    hf.save_pretrained(tmp_path / "hf")
    model = ch.load(tmp_path / "hf")
    assert model.labels == ["bad", "so so", "good"]
    model.save(tmp_path / "own")
    ch.export(ch.load(tmp_path / "own"), tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.id2label == {0: "bad", 1: "so so", 2: "good"}
    assert config.label2id == {"bad": 0, "so so": 1, "good": 2}


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("normalise", [False, True])
def test_a_sentence_model_is_written_with_its_modules(family, normalise, tmp_path):
    head = MEAN | {"normalise": normalise}
    model = with_words(family, head=head)
    model.tokenizer.max_len = 12
    ch.export(model, tmp_path / "out")
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    assert kinds == ["Transformer", "Pooling", "Normalize"][: 3 if normalise else 2]
    pooling = json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())
    assert [name for name, on in pooling.items() if on is True] == ["pooling_mode_mean_tokens"]
    again = ch.load(tmp_path / "out")
    assert again.config == model.config
    assert again.embed(TEXTS).equal(model.embed(TEXTS))


@pytest.mark.parametrize(
    ("family", "head", "lacks"),
    [
        ("bert", None, True),
        ("bert", MEAN, True),
        ("bert", POOLER, False),
        ("bert", LABELS, False),
        ("roberta", None, True),
        ("vit", None, True),
        ("distilbert", None, False),
        ("gpt2", None, False),
    ],
)
def test_a_body_without_its_pooler_is_known_as_one(family, head, lacks, tmp_path):
    model = built(family, head=head)
    assert lacks_pooler(model.config) is lacks
    ch.export(model, tmp_path / "out")
    opened(tmp_path / "out", POOLER_KEYS if lacks else ())


# --- speech ---

SOUND = {"n_mels": 8, "source_len": 50, "d_model": 16, "n_layers": 1, "n_heads": 4, "max_len": 32}
ENGLISH = ("<|startoftranscript|>", "<|notimestamps|>")
MANY = (
    "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>", "<|transcribe|>",
    "<|notimestamps|>",
)  # fmt: skip


def listener(vocab_size: int, marks: tuple[str, ...]) -> ch.Model:
    """A tiny Whisper for one second of sound, with such marks among its tokens."""
    roles = {"eos": "<|endoftext|>", "bos": "<|endoftext|>", "unk": "<unk>"}
    words = train_tokenizer("words", TEXTS, special_tokens=roles, extra_tokens=marks)
    model = ch.build("whisper", seed=0, vocab_size=vocab_size, **SOUND)
    model.tokenizer = words
    return model


def prompt_of(folder: Path, **settings: Any) -> list[str]:
    """The tokens that transformers' own generate starts from, for a second of silence."""
    said = transformers.AutoProcessor.from_pretrained(folder)
    hf = opened(folder)
    given: list[torch.Tensor] = []

    def listen(module: Any, args: Any, more: dict[str, Any]) -> None:
        given.append(more["decoder_input_ids"])

    hf.register_forward_pre_hook(listen, with_kwargs=True)
    sound = said(torch.zeros(9000).numpy(), sampling_rate=16000, return_tensors="pt")
    assert sound.input_features.shape == (1, 8, 100)
    assert hf.generate(sound.input_features, max_new_tokens=3, **settings).shape[0] == 1
    return said.tokenizer.convert_ids_to_tokens(given[0][0].tolist())


@pytest.mark.filterwarnings("ignore")  # transformers' own, about its own arguments
def test_transformers_hears_with_an_exported_whisper(tmp_path):
    ch.export(listener(60, ENGLISH), tmp_path / "one")
    assert prompt_of(tmp_path / "one") == list(ENGLISH)
    ch.export(listener(51865, MANY), tmp_path / "many")
    settings = {"language": "de", "task": "translate"}
    wanted = ["<|startoftranscript|>", "<|de|>", "<|translate|>", "<|notimestamps|>"]
    assert prompt_of(tmp_path / "many", **settings) == wanted


def test_what_came_along_with_a_whisper_goes_before_what_is_made(tmp_path):
    model = listener(60, ENGLISH)
    model.companions["generation_config.json"] = {"suppress_tokens": [1, 2], "max_length": 20}
    model.companions["preprocessor_config.json"] = {"dither": 0.1, "feature_size": 8}
    ch.export(model, tmp_path / "out")
    again = ch.load(tmp_path / "out").companions
    said = again["generation_config.json"]
    assert (said["suppress_tokens"], said["max_length"]) == ([1, 2], 20)
    assert said["decoder_start_token_id"] == model.tokenizer.id("<|startoftranscript|>")
    assert again["preprocessor_config.json"]["dither"] == 0.1
    assert again["preprocessor_config.json"]["n_fft"] == 400


# --- other targets, and where to write ---


def test_a_family_that_gguf_does_not_have_is_blamed_before_its_tokeniser(tmp_path):
    with pytest.raises(ClearheadError, match='no architecture for the family "bert"'):
        ch.export(with_words("bert"), tmp_path / "a.gguf", to="gguf")


def test_a_gguf_file_opens_in_the_gguf_reader(tmp_path):
    gguf = pytest.importorskip("gguf")
    model = built("llama", d_model=32, n_kv_heads=2, d_ff=32)
    ch.export(model, tmp_path / "a.gguf", to="gguf", dtype="f32")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["llama.block_count"].contents() == 2
    found = {tensor.name: tensor for tensor in reader.tensors}
    table = torch.from_numpy(found["token_embd.weight"].data.copy())
    assert table.equal(model.net.embed.tokens.weight)
    again = ch.load(tmp_path / "a.gguf")
    ids = tokens(2, 9)
    torch.testing.assert_close(again(ids), model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"to": "tensorflow"}, 'no export to "tensorflow".*Known: hf, onnx, gguf'),
        ({"to": "gguff"}, 'Did you mean "gguf"'),
        ({"to": "hf", "dtype": "f16"}, "dtype is a setting of GGUF files"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_targets_that_are_none(changes, message, tmp_path):
    with pytest.raises(ClearheadError, match=message):
        ch.export(built("gpt2"), tmp_path / "out", **changes)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_things_is_not_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(ClearheadError, match=r"is there already.*--overwrite"):
        ch.export(built("gpt2"), tmp_path)
    with pytest.raises(ClearheadError, match=r"holds other things too \(thesis.tex\)"):
        ch.export(built("gpt2"), tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_not_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(ClearheadError, match=r"is there already.*--overwrite"):
        ch.export(built("gpt2"), tmp_path / "thesis.tex")
    with pytest.raises(ClearheadError, match="is a file: choose a folder"):
        ch.export(built("gpt2"), tmp_path / "thesis.tex", overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "years"


def test_an_empty_folder_is_written_into(tmp_path):
    (tmp_path / "out").mkdir()
    ch.export(built("gpt2"), tmp_path / "out")
    assert opened(tmp_path / "out")


def test_an_older_export_is_replaced_whole_and_only_if_asked(tmp_path):
    ch.export(with_words("bert", head=MEAN), tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(ClearheadError, match=r"out is there already.*overwrite=True"):
        ch.export(built("gpt2"), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    ch.export(built("gpt2"), tmp_path / "out", overwrite=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "model.safetensors",
    }  # fmt: skip


def test_what_fails_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    model = built("gpt2")

    def full(*args: Any, **more: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(ch.Model, "write_companions", full)
    with pytest.raises(ClearheadError, match="No space left"):
        ch.export(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_exported_file_has_every_tensor_once(tmp_path):
    ch.export(built("gpt2"), tmp_path / "out")
    file = load_file(tmp_path / "out" / folders.WEIGHTS)
    assert "lm_head.weight" not in file
    assert len({tensor.data_ptr() for tensor in file.values()}) == len(file)


def test_a_model_without_weights_is_not_exported(tmp_path):
    with pytest.raises(ClearheadError, match="meta"):
        ch.export(ch.build("gpt2", device="meta", **SIZES), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_half_precision_is_exported_as_it_is(tmp_path):
    model = built("gpt2")
    model.net.half()
    ch.export(model, tmp_path / "out")
    file = load_file(tmp_path / "out" / folders.WEIGHTS)
    assert {tensor.dtype for tensor in file.values()} == {torch.float16}
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.float16
