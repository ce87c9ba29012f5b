"""Positions: values, rotations, symmetries, and agreement with references and with loops."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.t5.modeling_t5 import T5Attention

from clearhead.attention.bias import ALiBi, T5Buckets, alibi_slopes
from clearhead.attention.mask import Causal
from clearhead.attention.positions import Positions
from clearhead.attention.relative import Shaw, TransformerXL
from clearhead.attention.rotary import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Rotary,
    Rotary2D,
    YarnScaling,
)
from clearhead.attention.softmax import softmax
from clearhead.attention.view import View
from clearhead.errors import ClearheadError
from clearhead.layers.embed import EmbedConfig
from clearhead.layers.position import (
    Learned,
    Learned2D,
    Sinusoidal,
    Sinusoidal2D,
    SinusoidalConfig,
    sinusoid,
)
from tiny import ABSOLUTE, RELATIVE, close, positioned, tokens

SPAN = Positions.span(0, 12)


def looking(q, k=None):
    """A view with the distances that relative positions ask for."""
    k = q if k is None else k
    return View(q, k, Causal(), None, None, distance=q.distance(k))


# --- sinusoidal ---


def test_sinusoidal_values_of_the_lectures():
    table = Sinusoidal(4)(SPAN)[0]
    printed = {1: [0.8415, 0.5403, 0.0100, 1.0000], 7: [0.6570, 0.7539, 0.0699, 0.9976]}
    for position, row in printed.items():
        assert torch.allclose(table[position], torch.tensor(row), rtol=0, atol=5.1e-5)
    assert table[0].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("base", [10000.0, 1000.0])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_sinusoidal_is_the_formula(layout, base):
    width = 6
    table = Sinusoidal(width, base, layout)(SPAN)[0]
    for p in range(12):
        for i in range(width // 2):
            angle = p / base ** (2 * i / width)
            sine, cosine = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + width // 2)
            assert table[p, sine] == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[p, cosine] == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("base", [10000.0, 50.0])
@pytest.mark.parametrize("shift", [1, 5, 40])
def test_a_shift_of_the_position_is_one_rotation(shift, base):
    """PE(p + k) = R(k) PE(p) with one block-diagonal rotation R(k) for all p."""
    width = 8
    rotation = torch.zeros(width, width)
    for i in range(width // 2):
        angle = shift / base ** (2 * i / width)
        block = [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
        rotation[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor(block)
    close(rotation @ rotation.T, torch.eye(width))
    p = torch.arange(30)
    close(sinusoid(p + shift, width, base), sinusoid(p, width, base) @ rotation.T, 2e-5)


def test_sinusoidal_rows_are_bounded_and_unique():
    table = sinusoid(torch.arange(500), 16)
    assert table.abs().max() <= 1
    close(table.norm(dim=1), torch.full((500,), math.sqrt(8)))
    distances = torch.cdist(table, table) + torch.eye(500)
    assert distances.min() > 1e-2


def test_concatenated_positions_stand_beside_the_tokens():
    embed = EmbedConfig(9, 16, SinusoidalConfig(width=6), scale=3.0).build()
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    x = embed(ids, Positions.span(5, 3))
    assert x.shape == (2, 3, 16)
    close(x[..., :10], embed.tokens.weight[ids] * 3)
    close(x[..., 10:], sinusoid(torch.arange(5, 8), 6).expand(2, -1, -1))


def test_added_positions_are_added():
    embed = EmbedConfig(9, 16, SinusoidalConfig(), scale=3.0).build()
    ids = torch.tensor([[1, 2, 3]])
    x = embed(ids, Positions.ragged([2], "left", start=4, width=3))
    expected = embed.tokens.weight[ids] * 3 + sinusoid(torch.tensor([[0, 4, 5]]), 16)
    close(x[:, 1:], expected[:, 1:])


def test_odd_widths_are_refused():
    with pytest.raises(ClearheadError, match="odd"):
        Sinusoidal(7)
    with pytest.raises(ClearheadError, match="divides by 4"):
        Sinusoidal2D(6, 3)
    with pytest.raises(ClearheadError, match="no room"):
        EmbedConfig(9, 16, SinusoidalConfig(width=16)).build()


# --- learned ---


def test_learned_positions_are_rows_of_a_table():
    learned = Learned(8, max_len=10, offset=2)
    at = Positions.ragged([3, 1], "left", start=[4, 0])
    rows = learned(at)
    close(rows[0], learned.table.weight[6:9])
    close(rows[1, 2], learned.table.weight[2])
    assert learned.table.num_embeddings == 12
    with pytest.raises(ClearheadError, match="Position 10 is beyond the learned table of 10"):
        learned(Positions.span(5, 6))


# --- two dimensions ---


def test_two_dimensional_sinusoids_are_rows_beside_columns():
    grid = Sinusoidal2D(12, columns=5, base=100.0, first=1)(Positions.span(0, 16))[0]
    assert (grid[0] == 0).all()  # the CLS token before the grid
    for cell in range(15):
        row, column = divmod(cell, 5)
        close(grid[1 + cell, :6], sinusoid(torch.tensor(row), 6, 100.0))
        close(grid[1 + cell, 6:], sinusoid(torch.tensor(column), 6, 100.0))


def test_two_dimensional_tables_are_rows_beside_columns():
    learned = Learned2D(8, rows=3, columns=4, first=1)
    grid = learned(Positions.span(0, 13))[0]
    assert (grid[0] == 0).all()
    for cell in range(12):
        close(grid[1 + cell, :4], learned.row_table.weight[cell // 4])
        close(grid[1 + cell, 4:], learned.column_table.weight[cell % 4])
    with pytest.raises(ClearheadError, match="outside the grid of 12 cells"):
        learned(Positions.span(0, 14))


@pytest.mark.parametrize(("rows", "columns"), [(6, 8), (2, 12), (3, 4), (5, 7)])
def test_resizing_keeps_constants_and_ramps(rows, columns):
    learned = Learned2D(8, rows=4, columns=4)
    with torch.no_grad():
        learned.row_table.weight[:] = 2.5
        learned.column_table.weight[:] = torch.arange(4.0).unsqueeze(1) * 3 + 1
    learned.resize(rows, columns)
    assert learned.row_table.weight.shape == (rows, 4)
    assert learned.column_table.weight.shape == (columns, 4)
    assert learned.column_table.weight.requires_grad
    close(learned.row_table.weight, torch.full((rows, 4), 2.5))
    # A ramp stays one between the outermost cell centres; beyond them it is held.
    centres = ((torch.arange(columns) + 0.5) * 4 / columns - 0.5).clamp(0, 3)
    close(learned.column_table.weight, (centres * 3 + 1).unsqueeze(1).expand(-1, 4))
    assert learned(Positions.span(0, rows * columns)).shape == (1, rows * columns, 8)


def test_resizing_to_the_same_grid_changes_nothing():
    learned = Learned2D(8, rows=4, columns=5)
    before = learned(Positions.span(0, 20))
    learned.resize(4, 5)
    close(learned(Positions.span(0, 20)), before, 1e-6)


# --- rotary ---

SCALINGS = {
    "none": None,
    "linear": LinearScaling(4.0),
    "ntk": NTKScaling(4.0),
    "yarn": YarnScaling(4.0, trained_len=64),
    "llama3": Llama3Scaling(8.0, trained_len=64),
}


def turned(rotary, x, start):
    """x rotated as if its first slot stood at `start`."""
    return rotary.rotate(x, rotary.tables(Positions.span(start, x.shape[2]), x.dtype))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rotary_scores_depend_on_the_difference_alone(scaling, fraction):
    rotary = Rotary(16, fraction=fraction, scaling=SCALINGS[scaling])
    q, k = torch.randn(2, 3, 7, 16), torch.randn(2, 3, 7, 16)

    def score(m, n):
        return turned(rotary, q, m) @ turned(rotary, k, n).transpose(2, 3)

    close(score(40, 33), score(7, 0), 1e-4)
    assert (score(8, 0) - score(7, 0)).abs().max() > 1e-2


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25])
def test_rotary_preserves_norms_and_keeps_the_rest(fraction):
    rotary = Rotary(16, fraction=fraction)
    x = torch.randn(2, 3, 7, 16)
    out = turned(rotary, x, 5)
    close(out.norm(dim=-1), x.norm(dim=-1))
    width = int(16 * fraction)
    assert torch.equal(out[..., width:], x[..., width:])
    assert (out[..., :width] - x[..., :width]).abs().max() > 0.1
    close(turned(rotary, x[:, :, :1], 0), x[:, :, :1])  # position 0 is not turned


def test_rotary_is_the_rotation_of_pairs():
    rotary = Rotary(6, theta=100.0)
    x = torch.randn(1, 1, 1, 6)
    out = turned(rotary, x, 3)[0, 0, 0]
    for i in range(3):
        angle = 3 / 100 ** (2 * i / 6)
        a, b = x[0, 0, 0, i], x[0, 0, 0, i + 3]
        close(out[i], a * math.cos(angle) - b * math.sin(angle))
        close(out[i + 3], a * math.sin(angle) + b * math.cos(angle))


def test_linear_scaling_divides_positions():
    plain, scaled = Rotary(16), Rotary(16, scaling=LinearScaling(4.0))
    x = torch.randn(1, 2, 9, 16)
    every_fourth = plain.tables(Positions.of(torch.arange(0, 9).unsqueeze(0)), x.dtype)
    at = Positions.of(torch.arange(0, 36, 4).unsqueeze(0))
    close(scaled.rotate(x, scaled.tables(at, x.dtype)), plain.rotate(x, every_fourth))


def theirs(kind, seq_len=None, **settings):
    """Frequencies and factor as transformers computes them."""
    rope = {"rope_type": kind, "rope_theta": 500.0, **settings}
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters=rope,
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)


@pytest.mark.parametrize(
    ("ours", "kind", "settings"),
    [
        (LinearScaling(3.0), "linear", {"factor": 3.0}),
        (
            YarnScaling(4.0, trained_len=64),
            "yarn",
            {"factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            YarnScaling(4.0, 64, beta_fast=8.0, beta_slow=2.0, truncate=False),
            "yarn",
            {
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
                "truncate": False,
            },
        ),
        (
            YarnScaling(4.0, 64, attention_factor=0.7),
            "yarn",
            {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.7},
        ),
        (
            Llama3Scaling(8.0, 1.0, 4.0, 64),
            "llama3",
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
    ids=["linear", "yarn", "yarn-untruncated", "yarn-factor", "llama3"],
)
def test_rope_scalings_against_transformers(ours, kind, settings):
    frequencies, factor = theirs(kind, **settings)
    rotary = Rotary(16, 500.0, scaling=ours)
    torch.testing.assert_close(rotary.frequencies, frequencies, rtol=1e-6, atol=0)
    assert rotary.factor == pytest.approx(factor)
    # Each of them changes something, so that the comparison says something.
    assert (rotary.frequencies / Rotary(16, 500.0).frequencies).min() < 0.9


def test_ntk_scaling_is_a_larger_theta():
    rotary = Rotary(16, 500.0, scaling=NTKScaling(4.0))
    close(rotary.frequencies, Rotary(16, 500.0 * 4 ** (16 / 14)).frequencies, 1e-7)
    # The fastest keeps its angle, and the slowest is stretched by just the factor.
    assert rotary.frequencies[0] == 1
    close(rotary.frequencies[-1] * 4, Rotary(16, 500.0).frequencies[-1], 1e-6)
    # transformers' dynamic form at the length where it has grown by this much.
    dynamic, _ = theirs("dynamic", seq_len=512, factor=3.0)
    torch.testing.assert_close(rotary.frequencies, dynamic, rtol=1e-6, atol=0)


def test_rotary_2d_depends_on_row_and_column_differences_alone():
    rotary = Rotary2D(16, columns=10, first=1)
    q, k = torch.randn(16), torch.randn(16)

    def score(q_cell, k_cell):
        cells = torch.tensor([[1 + r * 10 + c for r, c in (q_cell, k_cell)]])
        both = torch.stack((q, k)).view(1, 1, 2, 16)
        a, b = rotary.rotate(both, rotary.tables(Positions.of(cells), q.dtype))[0, 0]
        return a @ b

    close(score((3, 7), (1, 2)), score((5, 9), (3, 4)))
    close(score((3, 7), (1, 2)), score((2, 5), (0, 0)))
    assert abs(score((3, 7), (1, 2)) - score((4, 7), (1, 2))) > 1e-3
    assert abs(score((3, 7), (1, 2)) - score((3, 8), (1, 2))) > 1e-3
    # A CLS token before the grid is not turned.
    x = torch.randn(1, 1, 1, 16)
    close(rotary.rotate(x, rotary.tables(Positions.span(0, 1), x.dtype)), x)


def test_rotary_2d_is_two_rotaries_side_by_side():
    rotary, line = Rotary2D(16, columns=3, theta=50.0), Rotary(8, 50.0)
    x = torch.randn(2, 2, 9, 16)
    out = rotary.rotate(x, rotary.tables(Positions.span(0, 9), x.dtype))
    rows = Positions.of(torch.arange(9).unsqueeze(0) // 3)
    columns = Positions.of(torch.arange(9).unsqueeze(0) % 3)
    close(out[..., :8], line.rotate(x[..., :8], line.tables(rows, x.dtype)))
    close(out[..., 8:], line.rotate(x[..., 8:], line.tables(columns, x.dtype)))


def test_rotary_tables_have_the_dtype_that_was_asked_for():
    cos, sin = Rotary(8).tables(SPAN, torch.float64)
    assert cos.dtype == sin.dtype == torch.float64


def test_rotary_widths_are_checked():
    for bad in (
        {"head_dim": 7},
        {"head_dim": 8, "fraction": 0.1},
        {"head_dim": 8, "fraction": 2.0},
    ):
        with pytest.raises(ClearheadError, match="must be even"):
            Rotary(**bad)
    with pytest.raises(ClearheadError, match="divides by 4"):
        Rotary2D(6, 3)


# --- biases ---


def test_alibi_slopes_of_the_paper():
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(16) == pytest.approx([2 ** (-i / 2) for i in range(1, 17)])
    # No power of two: those of 8 heads, then every other one of 16.
    assert alibi_slopes(12) == pytest.approx(
        [2.0**-i for i in range(1, 9)] + [2 ** (-i / 2) for i in (1, 3, 5, 7)]
    )
    assert alibi_slopes(1) == [2.0**-8]


def test_alibi_is_minus_slope_times_distance():
    bias = ALiBi(8)(looking(Positions.span(3, 5), Positions.span(0, 8)))[0]
    for head, i, j in [(0, 0, 0), (3, 2, 7), (7, 4, 1)]:
        assert bias[head, i, j] == pytest.approx(-(2.0 ** -(head + 1)) * abs(3 + i - j))


@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (8, 16), (16, 100)])
@pytest.mark.parametrize("causal", [False, True])
def test_t5_buckets_against_transformers(causal, buckets, far):
    ours = T5Buckets(4, buckets, far, causal)
    distance = torch.arange(-300, 301).view(1, 1, -1)
    expected = T5Attention._relative_position_bucket(
        -distance, bidirectional=not causal, num_buckets=buckets, max_distance=far
    )
    assert torch.equal(ours.bucket(distance), expected)
    assert len(expected.unique()) >= buckets - 1


def test_t5_bias_is_a_look_up():
    ours = T5Buckets(4, 8, 16, causal=True)
    view = looking(Positions.span(3, 2), Positions.span(0, 5))
    bias = ours(view)
    for i in range(2):
        for j in range(5):
            bucket = ours.bucket(torch.tensor([[[3 + i - j]]])).item()
            close(bias[0, :, i, j], ours.table.weight[bucket])


# --- relative to the content ---


@pytest.mark.parametrize("start", [0, 6])
def test_shaw_is_the_loop(start):
    shaw = Shaw(head_dim=4, max_distance=2, scale=0.5)
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5 + start, 4)
    view = looking(Positions.span(start, 5), Positions.span(0, 5 + start))
    bias = shaw(q, k, view)
    for i in range(5):
        for j in range(5 + start):
            clipped = max(-2, min(2, start + i - j))
            close(bias[:, :, i, j], 0.5 * q[:, :, i] @ shaw.table.weight[clipped + 2])


@pytest.mark.parametrize("kv", [4, 2])
@pytest.mark.parametrize("start", [0, 6])
def test_transformer_xl_is_the_loop(start, kv):
    """scale * ((q + u) . k + (q + v) . W_R sinusoid(i - j)), of which the kernel adds q . k."""
    xl = TransformerXL(d_model=8, n_heads=4, head_dim=3, scale=0.5)
    torch.nn.init.normal_(xl.u)
    torch.nn.init.normal_(xl.v)
    q, k = torch.randn(2, 4, 5, 3), torch.randn(2, kv, 5 + start, 3)
    view = looking(Positions.span(start, 5), Positions.span(0, 5 + start))
    bias = xl(q, k, view)
    for i in range(5):
        for j in range(5 + start):
            distance = start + i - j
            angles = [distance / 10000 ** (2 * n / 8) for n in range(4)]
            wave = torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
            r = (xl.r_proj.weight @ wave).view(4, 3)
            for head in range(4):
                key = k[:, head * kv // 4, j]
                whole = (q[:, head, i] + xl.u[head]) * key
                position = (q[:, head, i] + xl.v[head]) @ r[head]
                expected = 0.5 * (whole.sum(-1) + position - (q[:, head, i] * key).sum(-1))
                close(bias[:, head, i, j], expected, 2e-5)


@pytest.mark.parametrize("make", [lambda: Shaw(4, 3, 0.5), lambda: TransformerXL(8, 4, 4, 0.5)])
def test_relative_biases_ignore_where_a_text_starts_and_empty_slots(make):
    relative = make()
    q, k = torch.randn(1, 4, 6, 4), torch.randn(1, 4, 6, 4)
    at = Positions.span(0, 6)
    here = relative(q, k, looking(at))
    close(relative(q, k, looking(Positions.span(50, 6))), here, 1e-4)
    # Two rows at different places, one with empty slots: what is seen is the same.
    ragged = Positions.ragged([6, 4], "left", start=[9, 30])
    two = relative(q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1), looking(ragged))
    close(two[:1], here, 1e-4)
    view = View.of(Causal(), ragged)
    pattern = softmax(two, view)
    alone = softmax(here[:, :, 2:, 2:], View.of(Causal(), Positions.span(0, 4)))
    close(pattern[1:, :, 2:, 2:], alone, 1e-4)


# --- in a whole model ---


@pytest.mark.parametrize("position", RELATIVE)
def test_relative_schemes_do_not_know_where_a_text_starts(position):
    net, ids = positioned(position), tokens(2, 9)
    close(net(ids, Positions.span(37, 9)), net(ids), 1e-4)


@pytest.mark.parametrize("position", ABSOLUTE)
def test_absolute_schemes_do_know(position):
    net, ids = positioned(position), tokens(2, 9)
    assert (net(ids, Positions.span(37, 9)) - net(ids)).abs().max() > 1e-2


@pytest.mark.parametrize("position", [name for name in RELATIVE | ABSOLUTE if name != "none"])
def test_every_scheme_tells_the_order(position):
    """The last token's answer changes when two earlier ones change places."""
    net, ids = positioned(position), tokens(2, 9)
    swapped = ids[:, [3, 1, 2, 0, 4, 5, 6, 7, 8]]
    assert (net(swapped)[:, -1] - net(ids)[:, -1]).abs().max() > 1e-3
