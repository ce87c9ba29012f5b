"""Initialisation: the spread of every kind of weight, in every style, and what a seed fixes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import clearhead as ch
import tiny
from clearhead.attention.attention import Attention
from clearhead.layers.init import initialise
from clearhead.models.family import FAMILIES, family

WIDTH, INNER, HEAD, LAYERS, VOCAB = 64, 256, 16, 3, 500
SIZES = {"vocab_size": VOCAB, "d_model": WIDTH, "n_heads": 4, "n_layers": LAYERS, "max_len": 128}


def built(name: str = "gpt2", **changes):
    return ch.build(name, seed=0, **SIZES | changes).net


def drawn(style: str, name: str = "gpt2", **changes):
    net = built(name, **changes)
    initialise(net, style, torch.Generator().manual_seed(3))
    return net


def spread(weights: list[torch.Tensor], std: float) -> None:
    """Mean 0 and this standard deviation, as nearly as that many numbers can show it."""
    numbers = torch.cat([w.detach().flatten() for w in weights])
    error = 5 / math.sqrt(2 * len(numbers))  # five standard errors
    assert numbers.std().item() == pytest.approx(std, rel=error)
    assert abs(numbers.mean().item()) < 5 * std / math.sqrt(len(numbers))


def weights(net, *names: str) -> list[torch.Tensor]:
    """The matrices of all blocks under these names."""
    found = [p for path, p in net.named_parameters() if path.endswith(tuple(names))]
    assert found, names
    return found


IN = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "ffn.in_proj.weight")
ATTENTION_OUT, FFN_OUT = "attn.out_proj.weight", "ffn.out_proj.weight"


# --- the styles ---


@pytest.mark.parametrize("name", ["gpt2", "transformer"])
def test_xavier_is_uniform_up_to_its_bound(name):
    net = drawn("xavier", name)
    for _, linear in linears(net):
        bound = math.sqrt(6 / (linear.in_features + linear.out_features))
        assert linear.weight.abs().max() <= bound
        assert linear.weight.abs().max() > 0.99 * bound
        spread([linear.weight], bound / math.sqrt(3))
        # uniform and not normal: flat, so that half of the numbers lie in the inner half
        inner = (linear.weight.abs() < bound / 2).float().mean().item()
        assert inner == pytest.approx(0.5, abs=0.03)


def test_he_keeps_the_variance_of_a_relu():
    net = drawn("he")
    spread(weights(net, *IN, ATTENTION_OUT), math.sqrt(2 / WIDTH))
    spread(weights(net, FFN_OUT), math.sqrt(2 / INNER))
    linear = next(linear for name, linear in linears(net) if name.endswith("ffn.in_proj"))
    x = torch.randn(2000, WIDTH)
    assert linear(x).relu().square().mean().item() == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("style", ["xavier", "he"])
def test_embeddings_have_rows_of_length_1(style):
    net = drawn(style)
    spread([net.embed.tokens.weight], WIDTH**-0.5)
    assert net.embed.tokens.weight.norm(dim=1).mean().item() == pytest.approx(1, rel=0.02)


def test_gpt2_is_small_and_smaller_where_it_writes():
    net = drawn("gpt2")
    spread(weights(net, *IN), 0.02)
    spread([net.embed.tokens.weight], 0.02)
    spread([net.embed.position.table.weight], 0.02)
    spread(weights(net, ATTENTION_OUT, FFN_OUT), 0.02 / math.sqrt(2 * LAYERS))


def test_gpt2_counts_the_writers_of_each_stream():
    """A decoder with cross-attention has three a block, an encoder two."""
    net = drawn("gpt2", "transformer")
    spread(weights(net.encoder, ATTENTION_OUT, FFN_OUT), 0.02 / math.sqrt(2 * LAYERS))
    spread(weights(net.decoder, ATTENTION_OUT, FFN_OUT), 0.02 / math.sqrt(3 * LAYERS))


def test_gpt2_stream_keeps_its_size_however_deep():
    """What the scaling is for: the writers' sum has the variance of one of them."""
    spreads = []
    for layers in (2, 8):
        outs = weights(drawn("gpt2", n_layers=layers), ATTENTION_OUT)
        spreads.append(sum(w.var().item() for w in outs))
    assert spreads[0] == pytest.approx(spreads[1], rel=0.1)


def test_t5_divides_by_the_width_and_queries_by_their_head():
    ffn = {"kind": "plain", "d_ff": INNER, "activation": "relu", "bias": False}
    net = drawn("t5", "t5", ffn=ffn, head_dim=HEAD, head={"kind": "t5_lm", "tied": False})
    spread(weights(net, "q_proj.weight"), (WIDTH * HEAD) ** -0.5)
    spread(weights(net, "k_proj.weight", "v_proj.weight", "in_proj.weight"), WIDTH**-0.5)
    spread(weights(net, ATTENTION_OUT), (4 * HEAD) ** -0.5)
    spread(weights(net, FFN_OUT), INNER**-0.5)
    spread([net.encoder.embed.tokens.weight], 1.0)


def test_t5_scores_start_with_variance_1():
    """Queries are smaller because T5 does not divide the scores by sqrt(head_dim)."""
    attention = Attention(WIDTH, 4, biases=(False,) * 4)
    initialise(attention, "t5", torch.Generator().manual_seed(3))
    x = torch.randn(1, 400, WIDTH)
    q, k = (
        proj(x).view(400, 4, HEAD).transpose(0, 1) for proj in (attention.q_proj, attention.k_proj)
    )
    assert (q @ k.transpose(1, 2)).var().item() == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize("style", ["xavier", "he", "gpt2", "t5"])
def test_norms_are_1_and_biases_0(style):
    net = tiny.noisy(built())  # so that nothing is 1 or 0 already
    initialise(net, style, torch.Generator().manual_seed(3))
    for module in net.modules():
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all()
        if isinstance(module, (nn.LayerNorm, nn.Linear)) and module.bias is not None:
            assert (module.bias == 0).all()


def linears(net) -> list[tuple[str, nn.Linear]]:
    """Projections; a tied head is the embedding, and drawn as one."""
    tied = {alias.removesuffix(".weight") for alias, _ in net.ties}
    return [(n, m) for n, m in net.named_modules() if isinstance(m, nn.Linear) and n not in tied]


# --- the families' own ---


@pytest.mark.parametrize(
    ("name", "std"),
    [("gpt2", 0.02), ("bert", 0.02), ("t5", 1.0), ("transformer", WIDTH**-0.5), ("llama", 0.02)],
)
def test_a_tied_matrix_is_an_embedding(name, std):
    """And is not drawn once more as a projection, with another spread."""
    more = {} if name in ("bert", "t5", "transformer") else {"head": {"kind": "lm", "tied": True}}
    net = built(name, **more)
    assert net.ties
    for alias, original in net.ties:
        assert net.get_parameter(alias) is net.get_parameter(original)
        spread([net.get_parameter(alias)], std)


def test_families_use_their_own_style():
    styles = {"gpt2": "gpt2", "t5": "t5", "transformer": "xavier", "bert": "gpt2", "llama": "gpt2"}
    for name, style in styles.items():
        assert family(name).Config.init == style
        net, again = built(name), built(name)
        initialise(again, style, torch.Generator().manual_seed(0))
        assert equal(net, again)


def equal(one, other) -> bool:
    return all(a.equal(b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# --- seeds ---


def small(name: str, seed: int, state: int):
    """A family at a tiny size; the global random numbers stand elsewhere each time."""
    sizes = tiny.SIZES | {"n_heads": 2}
    torch.manual_seed(state)
    return ch.build(name, seed=seed, **{k: v for k, v in sizes.items() if k in names(name)}).net


def names(name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(family(name).Config)}


@pytest.mark.parametrize("name", [name for name in FAMILIES if "n_layers" in names(name)])
def test_the_seed_alone_decides(name):
    first, again, other = small(name, 5, state=1), small(name, 5, state=2), small(name, 6, state=1)
    for (path, a), b, c in zip(
        first.named_parameters(), again.parameters(), other.parameters(), strict=True
    ):
        assert a.equal(b), f"{path} depends on the global random numbers"
        if path.endswith(("proj.weight", "tokens.weight")):
            assert not a.equal(c), f"{path} does not depend on the seed"


def test_without_a_seed_pytorchs_own_decides():
    nets = []
    for state in (1, 1, 2):
        torch.manual_seed(state)
        nets.append(ch.build("gpt2", **tiny.SIZES).net)
    assert equal(nets[0], nets[1])
    assert not equal(nets[0], nets[2])


@pytest.mark.parametrize("style", ["xavier", "he", "gpt2", "t5"])
def test_a_convolution_is_drawn_as_the_projection_that_it_is(style):
    """Patches of 3 x 4 x 4 numbers, each projected to the width."""
    patches = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
    line = nn.Linear(48, WIDTH)
    for module in (patches, line):
        initialise(module, style, torch.Generator().manual_seed(3))
        assert (module.bias == 0).all()
    ratio = 1.0
    if style == "xavier":  # each pixel goes into WIDTH numbers, each channel into 16 times as many
        ratio = math.sqrt((48 + WIDTH) / (48 + 16 * WIDTH))
    torch.testing.assert_close(patches.weight.flatten(1), line.weight * ratio)


def test_no_two_matrices_are_the_same():
    """A generator that is started anew for each module would draw the same numbers."""
    net = built("gpt2")
    seen = [tuple(p.flatten()[:4].tolist()) for p in net.parameters() if p.dim() > 1]
    assert len(set(seen)) == len(seen)


def test_t5_biases_on_the_scores_start_small():
    net = ch.build("t5", n_layers=2, d_model=64, n_heads=8, vocab_size=50, seed=0).net
    table = net.encoder.stack.kinds[0].bias.table.weight
    assert table.std().item() == pytest.approx(64**-0.5, rel=0.2)
