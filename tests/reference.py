"""The oracle of the parity tests: tiny random models of `transformers`, and ours.

A reference is saved, and read back by us: what is compared is what a user would get. Gradients
travel the same road: the reference is saved once more with gradients in the place of its weights,
and the key table, which is linear, brings them to our names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor

from clearhead.models.base import Net
from clearhead.models.family import FamilyConfig, family
from clearhead.models.keys import Table
from clearhead.weights.convert import Report, to_ours, to_theirs
from clearhead.weights.hf import load_hf

transformers.utils.logging.disable_progress_bar()

TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def gpt2(**more: Any) -> transformers.GPT2LMHeadModel:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | tokens | more))


def llama(rope: dict[str, Any] | None = None, **more: Any) -> transformers.LlamaForCausalLM:
    if rope is not None:
        more["rope_parameters"] = {"rope_theta": 10000.0} | rope
    config = transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 2} | more)
    return transformers.LlamaForCausalLM(config)


def mistral(**more: Any) -> transformers.MistralForCausalLM:
    sizes = SIZES | {"num_key_value_heads": 2, "sliding_window": 4}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes | more))


def qwen2(**more: Any) -> transformers.Qwen2ForCausalLM:
    config = transformers.Qwen2Config(**SIZES | {"num_key_value_heads": 2} | more)
    return transformers.Qwen2ForCausalLM(config)


def qwen3(**more: Any) -> transformers.Qwen3ForCausalLM:
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 16}  # 4 heads of 16 in a stream of 32
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes | more))


def neox(**more: Any) -> transformers.GPTNeoXForCausalLM:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES | more))


def bert(kind: type = transformers.BertForMaskedLM, **more: Any) -> transformers.PreTrainedModel:
    return kind(transformers.BertConfig(**SIZES | more))


def t5(untied: bool = False, **more: Any) -> transformers.T5ForConditionalGeneration:
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_heads": 4}
    sizes |= {"num_layers": 2, "num_decoder_layers": 3, "decoder_start_token_id": 0}
    sizes |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
    # Scores are not scaled down in this family: smaller weights keep rounding errors small.
    sizes |= {"initializer_factor": 0.2}
    hf = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes | more))
    if untied:  # their config cannot say it any more; the published files still are
        hf.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 32) * 0.2)
    return hf


@dataclass
class Pair:
    """A reference and ours, from one file."""

    hf: transformers.PreTrainedModel
    net: Net
    config: FamilyConfig
    report: Report
    folder: Path

    @property
    def file(self) -> dict[str, Tensor]:
        """Their tensors on disk."""
        return load_file(self.folder / "model.safetensors")

    @property
    def table(self) -> Table:
        return family(self.config.kind).keys(self.config)

    @property
    def layers(self) -> int:
        return max(self.config.n_layers, getattr(self.config, "n_decoder_layers", None) or 0)

    def ours(self, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors under their names, as on disk, under our names."""
        return to_ours(theirs, self.table, self.layers, family(self.config.kind).PREFIX)[0]

    def theirs(self, ours: dict[str, Tensor]) -> dict[str, Tensor]:
        return to_theirs(ours, self.table, self.layers)


@torch.no_grad()
def randomise(module: torch.nn.Module, std: float = 0.2) -> None:
    """Move every weight away from where it was made, so that no norm is 1 and no bias is 0."""
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter) * std)


def pair(hf: transformers.PreTrainedModel, folder: Path, **changes: Any) -> Pair:
    """Save a reference with random weights and load it as ours; dropout is off in both."""
    randomise(hf, 0.1 if hf.config.model_type == "t5" else 0.2)
    hf.eval().save_pretrained(folder)
    net, config, report = load_hf(folder, **changes)
    return Pair(hf, net, config, report, folder)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change the settings in a reference's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tokens(rows: int = 2, length: int = 11) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length))


def check(pair: Pair, theirs: Tensor, ours: Tensor, real: Tensor | None = None) -> None:
    """The same output, and the same gradient of every parameter.

    The loss is a cross entropy, whatever the output is: its last axis are the logits. With `real`,
    booleans [b, t], only the slots that hold a token count.
    """
    if real is not None:
        theirs, ours = theirs[real], ours[real]
    torch.testing.assert_close(ours, theirs, **TOLERANCE)
    assert ours.std() > 0.03, "an output that is nearly constant proves nothing"
    targets = torch.randint(0, ours.shape[-1], ours.shape[:-1])
    for output in (theirs, ours):
        F.cross_entropy(output.flatten(0, -2), targets.flatten()).backward()
    expected = pair.ours(gradients_on_disk(pair))
    got = {name: parameter.grad for name, parameter in pair.net.named_parameters()}
    assert set(expected) == set(got)
    for name, gradient in got.items():
        assert gradient is not None, f"{name} got no gradient"
        torch.testing.assert_close(
            gradient, expected[name], **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )
        # A bias on keys moves all scores of a query alike, so its gradient is 0 but for rounding.
        assert gradient.abs().max() > 1e-6 or name.endswith("k_proj.bias"), f"{name}: nothing"


def gradients_on_disk(pair: Pair) -> dict[str, Tensor]:
    """Their gradients under the names that their files have."""
    for name, parameter in pair.hf.named_parameters():
        assert parameter.grad is not None, f"the reference has no gradient at {name}"
        parameter.data = parameter.grad.clone()
    folder = pair.folder.with_name(pair.folder.name + "-gradients")
    pair.hf.save_pretrained(folder)
    return load_file(folder / "model.safetensors")
