"""What models say about texts: how likely they are, their labels, tags and answers."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
import torch

import clearhead as ch
import tiny
from clearhead.errors import ClearheadError
from clearhead.generate.answer import answer_question, best_span
from clearhead.text.trained import train_tokenizer

TEXT = "the cat sat on the mat and the dog sat on the log"
LABELS = ["bad", "good", "odd"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer("bpe", [TEXT, "what is on the mat ?"], vocab_size=275)


def made(tokenizer, name, **more):
    sizes = tiny.SIZES | {"vocab_size": tokenizer.vocab_size}
    model = ch.build(name, seed=0, **sizes | more)
    tiny.noisy(model.net).requires_grad_(False)
    model.tokenizer = tokenizer
    return model


# --- how likely


def test_scores_are_log_probabilities_of_each_token(tokenizer):
    model = made(tokenizer, "gpt2", dropout=0.5)
    model.net.train()
    ids = tokenizer.encode(TEXT)
    found = model.score(TEXT)
    assert len(found) == len(ids) - 1
    assert model.net.training
    model.net.eval()
    for n in (1, 5, len(ids) - 1):
        alone = model.net(torch.tensor([ids[:n]]))[0, -1].log_softmax(0)[ids[n]]
        assert float(found[n - 1]) == pytest.approx(float(alone), rel=1e-4)


def test_a_target_is_scored_for_its_source(tokenizer):
    model = made(tokenizer, "t5")
    model.companions["generation_config.json"] = {"decoder_start_token_id": 3}
    ids = tokenizer.encode("the dog")
    found = model.score("the dog", source="the cat")
    logits = model.net(torch.tensor([tokenizer.encode("the cat")]), torch.tensor([[3, *ids[:-1]]]))
    expected = logits[0].log_softmax(-1)[torch.arange(len(ids)), ids]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ClearheadError, match="source"):
        model.score("the dog")


def test_texts_that_cannot_be_scored(tokenizer):
    with pytest.raises(ClearheadError, match="two tokens at least"):
        made(tokenizer, "gpt2").score("t")
    with pytest.raises(ClearheadError, match="score it in pieces"):
        made(tokenizer, "gpt2", max_len=4).score(TEXT)
    with pytest.raises(ClearheadError, match="Only an encoder-decoder"):
        made(tokenizer, "gpt2").score(TEXT, source="a")
    with pytest.raises(ClearheadError, match="encoder and cannot"):
        made(tokenizer, "bert").score(TEXT)


# --- labels


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "gpt2"])
def test_classes_do_not_depend_on_the_batch(tokenizer, name):
    model = made(tokenizer, name, head={"kind": "classification", "n_labels": 3})
    texts = ["the cat", "on the mat and the dog", ("the log", "a dog sat"), "a"]
    numbered = model.classify(texts)
    assert {frozenset(one) for one in numbered} == {frozenset("012")}
    model.companions["labels.json"] = LABELS
    found = model.classify(texts)
    for text, one in zip(texts, found, strict=True):
        assert model.classify(text) == pytest.approx(one, rel=1e-4)
        assert sum(one.values()) == pytest.approx(1)
        assert list(one.values()) == sorted(one.values(), reverse=True)
    logits = model.net(torch.tensor([tokenizer.encode("the cat")]))[0]
    assert next(iter(found[0])) == LABELS[int(logits.argmax())]
    assert found[0]["odd"] == pytest.approx(float(logits.softmax(0)[2]), rel=1e-4)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.filterwarnings("ignore:.* have more than the 24 tokens")
def test_of_a_long_pair_both_texts_count(tokenizer, name):
    model = made(tokenizer, name, head={"kind": "classification", "n_labels": 3}, max_len=24)
    with pytest.warns(UserWarning, match="1 of 2 texts have more than the 24 tokens"):
        model.classify(["the dog", TEXT * 3])
    one, other = (model.classify((TEXT * 3, second)) for second in ("the dog", "a log"))
    assert one != pytest.approx(other, rel=1e-4)
    assert model.classify((TEXT * 3, "the dog")) == model.classify((TEXT * 4, "the dog"))
    first, same = (model.classify((start, TEXT * 3)) for start in ("the dog", "a log"))
    assert first != pytest.approx(same, rel=1e-4)


def test_several_labels_may_be_true(tokenizer, tmp_path):
    head = {"kind": "classification", "n_labels": 3, "true": "several"}
    model = made(tokenizer, "bert", head=head)
    logits = model.net(torch.tensor([tokenizer.encode("the cat")]))[0]
    expected = dict(zip("012", logits.sigmoid().tolist(), strict=True))
    assert model.classify("the cat") == pytest.approx(expected, rel=1e-4)
    model.save(tmp_path / "own")
    ch.export(model, tmp_path / "hf")
    for folder in ("own", "hf"):
        found = ch.load(tmp_path / folder).classify("the cat")
        named = {name.removeprefix("LABEL_"): value for name, value in found.items()}
        assert named == pytest.approx(expected, rel=1e-4)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    measured = config | {"problem_type": "regression"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(measured))
    found = ch.load(tmp_path / "hf").classify("the cat")
    expected = {f"LABEL_{i}": float(logit) for i, logit in enumerate(logits)}
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_head_with_one_output_measures(tokenizer):
    model = made(tokenizer, "bert", head={"kind": "classification", "n_labels": 1})
    logits = model.net(torch.tensor([tokenizer.encode("the cat")]))[0]
    assert model.classify("the cat") == {"0": pytest.approx(float(logits), rel=1e-4)}


def test_every_word_gets_the_tag_of_its_first_token(tokenizer):
    model = made(tokenizer, "bert", head={"kind": "tagging", "n_labels": 3})
    model.companions["labels.json"] = LABELS
    words = ["the", "elephant", "sat", "on", "a", "log"]
    encoded = tokenizer.encode_words(words)
    best = model.net(torch.tensor([encoded.ids]))[0].argmax(-1).tolist()
    expected = [LABELS[best[encoded.words.index(i)]] for i in range(len(words))]
    assert model.tag(words) == list(zip(words, expected, strict=True))
    assert model.tag(" ".join(words)) == model.tag(words)
    assert len(encoded.ids) > len(words)  # some words are of several tokens


def test_labels_and_heads_that_do_not_fit(tokenizer, unchecked):
    model = made(tokenizer, "bert", head={"kind": "classification", "n_labels": 3})
    model.companions["labels.json"] = LABELS[:2]
    with pytest.raises(ClearheadError, match="tells 3 labels apart, and 2 have names"):
        model.classify("the")
    with pytest.raises(ClearheadError, match="tuples of two"):
        model.classify([("a", "b", "c")])
    for call, said in [
        (model.tag, "tagging head"),
        (model.embed, "pooling head"),
        (lambda text: model.answer(text, text), "span head"),
        (made(tokenizer, "bert").classify, "classification head"),
    ]:
        with pytest.raises(ClearheadError, match=said):
            call("the cat")
    tagger = made(tokenizer, "bert", head={"kind": "tagging", "n_labels": 3}, max_len=4)
    with pytest.raises(ClearheadError, match="no words"):
        tagger.tag("  ")
    with pytest.raises(ClearheadError, match="cut it into shorter ones"):
        tagger.tag(TEXT)


# --- answers


def test_the_best_span_by_trying_all():
    dice = torch.Generator().manual_seed(0)
    for length in (1, 2, 7):
        logits = torch.randn(length, 2, generator=dice)
        spans = {
            (i, j): float(logits[i, 0] + logits[j, 1])
            for i in range(length)
            for j in range(i, min(length, i + 3))
        }
        total, score, i, j = best_span(logits, longest=3)
        assert total == pytest.approx(max(spans.values()))
        assert spans[i, j] == max(spans.values())
        p = logits.softmax(0)
        assert score == pytest.approx(float(p[i, 0] * p[j, 1]))


def test_answers_are_pieces_of_the_context_however_long_it_is(tokenizer):
    model = made(tokenizer, "bert", head={"kind": "span"})
    found = model.answer(question="what is on the mat ?", context=TEXT)
    assert TEXT[found.start : found.end] == found.text == found.text.strip()
    assert 0 < found.score <= 1
    long = " ".join([TEXT] * 5)
    found = model.answer(question="what ?", context=long)  # several windows of 64 tokens
    assert long[found.start : found.end] == found.text != ""
    with pytest.raises(ClearheadError, match="context is empty"):
        model.answer(question="what ?", context="")
    with pytest.raises(ClearheadError, match="question alone"):
        model.answer(question=long, context=TEXT)


class Lookup(torch.nn.Module):
    """A network for which every token answers for itself, wherever it stands."""

    embed = None

    def __init__(self, vocab_size):
        super().__init__()
        dice = torch.Generator().manual_seed(5)
        self.table = torch.nn.Parameter(torch.randn(vocab_size, 2, generator=dice), False)

    def at_rest(self):
        return contextlib.nullcontext()

    def forward(self, ids, at):
        return self.table[ids]


def test_windows_of_a_long_context_find_what_one_window_would(tokenizer):
    net = Lookup(tokenizer.vocab_size)
    context = " ".join(random.Random(1).choices(TEXT.split() + list("?abcdefghijklm"), k=120))
    whole = answer_question(net, tokenizer, "what ?", context, 10_000)
    for max_len in (80, 100, 173):
        parts = answer_question(net, tokenizer, "what ?", context, max_len)
        assert (parts.text, parts.start, parts.end) == (whole.text, whole.start, whole.end)
