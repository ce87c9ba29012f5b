"""`walk`: the lectures' worked examples to four decimals, and the head over any sentence."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from clearhead.cli import main as cli
from clearhead.cli import walk as command
from clearhead.errors import ClearheadError
from clearhead.lens.walk import MAX_WORDS, MEANING, sinusoids, split_words, walk_sentence
from clearhead.lens.worked import walk_example

SENTENCE = "The chicken didn't cross the road because it was too tired"


def close(values, expected, decimals=4):
    """Equal to the printed digits."""
    np.testing.assert_allclose(values, np.array(expected), rtol=0, atol=0.5000001 * 10**-decimals)


# --- the lectures' examples ---


def test_example_1_looks_for_an_animal():
    walk = walk_example(1)
    close(walk["scores"], [[0.30, 0.96, 0.10, 0.00, 0.30, 0.20]])
    close(walk["scaled"], [[0.15, 0.48, 0.05, 0.00, 0.15, 0.10]])
    close(walk["pattern"], [[0.1637, 0.2277, 0.1481, 0.1409, 0.1637, 0.1557]])
    close(walk["out"], [[0.2213, 0.1333, 0.2334, 0.5756]])
    assert walk.step("pattern").columns == ("the₁", "cat", "sat", "on", "the₂", "mat")
    assert [link[:2] for link in walk.strongest()] == [("animal?", "cat")]


def test_example_2_with_projections():
    walk = walk_example(2)
    close(
        walk["q"],
        [
            [1.25, 0.60, 0.70],
            [0.90, 1.60, 0.95],
            [0.90, 0.95, 1.45],
            [1.95, 1.05, 1.05],
            [1.25, 1.65, 1.00],
        ],
    )
    # By hand, first row: k = [.8+.15+.04, .2+.45+.02, .3+.05+.16], v = [1+.1+.02, .3+.5+.06, ...].
    close(walk["k"][0], [0.99, 0.67, 0.51])
    close(walk["v"][0], [1.12, 0.86, 0.60])
    close(walk["scores"][0, 0], 1.25 * 0.99 + 0.60 * 0.67 + 0.70 * 0.51)
    assert walk["out"].shape == (5, 3)


def test_example_3_without_projections():
    walk = walk_example(3)
    close(walk["pattern"][0], [0.1903, 0.2100, 0.1882, 0.2076, 0.2040])
    close(walk["out"][0], [0.8831, 0.7423, 0.6165])


def test_example_4_softmax_alone():
    walk = walk_example(4)
    close(walk["pattern"], [[0.5050, 0.0835, 0.0375, 0.3741]])
    assert [step.name for step in walk.steps][-1] == "pattern"


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_each_step_follows_from_those_before(number):
    walk = walk_example(number, temperature=0.7)
    close(walk["exponentials"], np.exp(walk["scaled"] - walk["scaled"].max(1, keepdims=True)), 12)
    close(walk["sums"], walk["exponentials"].sum(1, keepdims=True), 12)
    close(walk["pattern"].sum(1), np.ones(len(walk["pattern"])), 12)
    plain = np.exp(walk["scaled"])
    close(walk["pattern"], plain / plain.sum(1, keepdims=True), 12)


def test_temperature_towards_zero_is_a_hard_lookup():
    walk = walk_example(1, temperature=1e-4)
    close(walk["pattern"], [[0, 1, 0, 0, 0, 0]], 12)
    close(walk["out"], walk["v"][1:2], 12)


# --- a sentence ---


@settings(deadline=None, max_examples=60)
@given(
    words=st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=10),
    width=st.sampled_from([2, 4, 8]),
    seed=st.integers(-5, 5),
    causal=st.booleans(),
    temperature=st.floats(0.01, 100),
)
def test_any_text_gives_a_pattern(words, width, seed, causal, temperature):
    options = {"width": width, "seed": seed, "causal": causal, "temperature": temperature}
    sentence = " ".join(words)
    assume(sentence.split())
    walk = walk_sentence(sentence, **options)
    close(walk["pattern"].sum(1), np.ones(len(walk["pattern"])), 9)
    assert (walk["pattern"] >= 0).all()
    assert all(np.isfinite(walk[name]).all() for name in ("x", "q", "k", "v", "scores", "out"))
    close(walk["out"], walk["pattern"] @ walk["v"], 9)
    text = json.dumps(walk.to_dict(), allow_nan=False, ensure_ascii=False)
    assert json.loads(text.encode()) == walk.to_dict()


def test_causal_weights_ahead_are_exactly_zero():
    walk = walk_sentence(SENTENCE, causal=True)
    ahead = np.triu(np.ones_like(walk["pattern"], dtype=bool), 1)
    assert (walk["pattern"][ahead] == 0.0).all()
    assert np.isneginf(walk["masked"][ahead]).all()
    assert (walk["pattern"][~ahead] > 0).all()


def test_causal_row_does_not_depend_on_later_words():
    short, long = (walk_sentence(text, causal=True) for text in ("a b c", "a b c d e"))
    close(long["out"][:3], short["out"], 12)
    assert not np.allclose(walk_sentence("a b c d e")["out"][:3], walk_sentence("a b c")["out"])


def test_same_word_has_the_same_embedding_and_its_own_position():
    walk = walk_sentence("The dog saw the cat")
    rows = walk.step("x").rows
    assert rows == ("The₁", "dog", "saw", "the₂", "cat")
    assert (walk["embedding"][0] == walk["embedding"][3]).all()
    assert (walk["x"][0] != walk["x"][3]).any()
    assert (walk_sentence("a cat")["embedding"][1] == walk["embedding"][4]).all()


def test_the_head_is_the_same_everywhere():
    """Numbers that were once computed: another version of numpy or Python must not change them."""
    walk = walk_sentence("the cat")
    close(walk["embedding"], [[0.52, -1.64, 0.12, 0.86], [-0.82, -0.89, -0.57, 1.22]])
    close(walk["pattern"], [[0.6290, 0.3710], [0.6793, 0.3207]])
    assert (walk_sentence("the cat", seed=1)["W_Q"] != walk["W_Q"]).any()


def test_positions_are_the_lectures():
    table = sinusoids(8, 4)
    close(table[1], [0.8415, 0.5403, 0.0100, 1.0000])
    close(table[7], [0.6570, 0.7539, 0.0699, 0.9976])
    close(walk_sentence("a b")["position"], table[:2], 12)


@pytest.mark.parametrize("width", [4, 32])
def test_scaled_scores_spread_about_as_one_product_does(width):
    """The reason for sqrt(d): without it the spread of scores grows with the width."""
    words = " ".join(f"w{i}" for i in range(60))
    walk = walk_sentence(words, width=width)
    close(walk["scaled"], walk["scores"] / math.sqrt(width), 12)
    assert 0.3 < walk["scaled"].std() < 3
    assert walk["scores"].std() == pytest.approx(walk["scaled"].std() * math.sqrt(width))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's fine.", ("It's", "fine", ".")),
        ("  «Où?»\tdit-il ", ("«", "Où", "?", "»", "dit-il")),
        ("नमस्ते दुनिया!", ("नमस्ते", "दुनिया", "!")),
        ("...", (".", ".", ".")),
        ("[red]x[/red]", ("[", "red]x[/red", "]")),
        ("a\x1b[31mb", ("a\N{REPLACEMENT CHARACTER}[31mb",)),
        ("\udc80", ("\N{REPLACEMENT CHARACTER}",)),
        ("e\u0301", ("é",)),
    ],
)
def test_words(text, words):
    assert split_words(text) == words


def test_steps_cannot_be_changed_and_explain_themselves():
    walk = walk_sentence(SENTENCE, causal=True)
    with pytest.raises(ValueError, match="read-only"):
        walk["pattern"][0, 0] = 1
    assert {step.name for step in walk.steps} == set(MEANING) | {"scaled"}
    for step in walk.steps:
        assert step.values.shape == (len(step.rows), len(step.columns))
        assert step.meaning.endswith(".")
    assert "sqrt(4) = 2.0000" in walk.step("scaled").meaning
    assert "independent, with mean 0" in walk.step("scaled").meaning
    assert "several heads" in walk.step("out").meaning
    assert "output projection" in walk.step("out").meaning


def test_made_up_weights_are_said_to_be():
    """And those of a worked example to be given."""
    walk = walk_sentence("the cat sat")
    assert "made up from the seed" in walk.step("W_Q").meaning
    formulas = [walk.step(name).formula for name in ("W_Q", "W_K", "W_V")]
    assert formulas == ["made up from the seed"] * 3
    given_ones = walk_example(2)
    assert {given_ones.step(name).formula for name in ("W_Q", "W_K", "W_V")} == {"given"}
    assert "seed" not in given_ones.step("W_Q").meaning


# --- bad input ---


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: walk_sentence(""), "no words. Give some"),
        (lambda: walk_sentence(" \t\n"), "no words. Give some"),
        (lambda: walk_sentence("a " * (MAX_WORDS + 1)), "65 words .* Give a shorter one"),
        (lambda: walk_sentence("a", width=0), "even number from 2 to 64, not 0"),
        (lambda: walk_sentence("a", width=5), "even number from 2 to 64, not 5"),
        (lambda: walk_sentence("a", width=1000), "even number from 2 to 64, not 1000"),
        (lambda: walk_sentence("a", temperature=0), "temperature must lie between"),
        (lambda: walk_sentence("a", temperature=-1), "temperature must lie between"),
        (lambda: walk_sentence("a", temperature=math.nan), "temperature must lie between"),
        (lambda: walk_sentence("a", temperature=math.inf), "temperature must lie between"),
        (lambda: walk_example(9), "no worked example 9: choose one of 1, 2, 3 and 4"),
        (lambda: walk_example(1, causal=True), "single query.*choose example 2 or 3"),
        (lambda: walk_example(4)["out"], 'no step "out"; it has scores, scaled'),
    ],
)
def test_bad_input(work, message):
    with pytest.raises(ClearheadError, match=message):
        work()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "--example", "1"], "Give a sentence or --example, not both."),
        (["--width", "6"], "--width belongs to a sentence"),
        (["--example", "2", "--seed", "1"], "--seed belongs to a sentence"),
        ([""], "The sentence has no words."),
    ],
)
def test_bad_input_on_the_command_line(words, message, capsys):
    assert cli.main(["walk", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"clearhead: {message}")
    assert captured.out == ""


# --- what is printed ---


def test_json_is_the_walk(capsys):
    assert cli.main(["walk", "the", "cat", "sat", "--causal", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == walk_sentence("the cat sat", causal=True).to_dict()
    masked = next(step for step in data["steps"] if step["name"] == "masked")
    assert masked["values"][0][1:] == [None, None]


def test_no_argument_is_example_1(capsys):
    assert cli.main(["walk", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == walk_example(1).to_dict()


def test_quotes_are_a_matter_of_taste(capsys):
    assert cli.main(["walk", "the", "cat"]) == 0
    apart = capsys.readouterr().out
    assert cli.main(["walk", "the cat"]) == 0
    assert capsys.readouterr().out == apart


def test_sentence_from_standard_input(monkeypatch, capsys):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n"))
    assert cli.main(["walk", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == walk_sentence("the cat").to_dict()


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_every_number_is_printed_whole(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["walk", SENTENCE]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    walk = walk_sentence(SENTENCE)
    for step in walk.steps:
        for number in step.values.flat:
            assert f"{abs(number):.4f}" in out
        assert f". {step.name} " in out
    assert "--json" not in out


def test_wide_matrices_are_drawn(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    sentence = " ".join(f"word{i}" for i in range(60))
    assert cli.main(["walk", sentence, "--causal"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "all their numbers: --json" in out
    assert "█" in out


def test_shades_go_from_blank_to_full():
    assert command._shades([0.0, 0.25, 0.5, 0.75, 1.0]) == list(" ░▒▓█")
    assert command._shades([2.0, -math.inf]) == ["█", " "]
    assert command._shades([-3.0, -1.0, -math.inf]) == [" ", "█", " "]


def test_markup_in_a_sentence_is_only_text(capsys):
    assert cli.main(["walk", "a[bold]b :smile:"]) == 0
    out = capsys.readouterr().out
    assert "a[bold]b" in out
    assert "smile" in out
