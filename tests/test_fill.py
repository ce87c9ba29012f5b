"""Filling masks: equal to transformers' pipeline, and what is refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

import clearhead as ch
import reference
from clearhead.errors import ClearheadError
from clearhead.text.trained import train_tokenizer

TEXT = "the cat sat on a mat and dog log capital of paris is france . ran to by sun sea"
WORDS = TEXT.split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Their fill-mask pipeline and our model, from one folder."""
    folder = tmp_path_factory.mktemp("bert")
    vocab = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    around = [("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])]
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, around)
    roles = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
    hf = reference.bert(vocab_size=len(vocab)).eval()
    reference.randomise(hf)
    hf.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pipe = transformers.pipeline("fill-mask", model=hf, tokenizer=tokenizer)
    return pipe, ch.load(folder)


TEXTS = ["the capital of [MASK] is paris .", "[MASK] cat", "the dog [MASK]"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("best", [1, 5])
def test_one_mask_is_filled_as_by_transformers(pair, text, best):
    pipe, model = pair
    theirs, ours = pipe(text, top_k=best), model.fill(text, best=best)
    assert [one.id for one in ours] == [one["token"] for one in theirs]
    assert [one.token for one in ours] == [one["token_str"] for one in theirs]
    scores = torch.tensor([one["score"] for one in theirs])
    torch.testing.assert_close(torch.tensor([one.probability for one in ours]), scores)
    for one in ours:
        if one.id >= len(SPECIAL):
            assert one.text == text.replace("[MASK]", one.token)


def test_several_masks_and_several_texts(pair):
    pipe, model = pair
    text = "the [MASK] sat on a [MASK] ."
    theirs, ours = pipe(text, top_k=3), model.fill(text, best=3)
    assert [[one.id for one in mask] for mask in ours] == [
        [one["token"] for one in mask] for mask in theirs
    ]
    assert "[MASK]" in ours[0][0].text  # the other one stays
    many = model.fill([*TEXTS, text])
    assert len(many) == 4
    for one, found in zip(TEXTS, many, strict=False):
        assert [each.id for each in found] == [each.id for each in model.fill(one)]
    assert [[one.id for one in mask[:3]] for mask in many[3]] == [
        [one.id for one in mask] for mask in ours
    ]


def test_all_probabilities_are_one(pair):
    everything = pair[1].fill("the [MASK] .", best=1000)
    assert len(everything) == len(SPECIAL) + len(WORDS)
    assert sum(one.probability for one in everything) == pytest.approx(1.0, abs=1e-5)


def test_what_cannot_be_filled(pair, unchecked):
    model = pair[1]
    for text, best, said in [
        ("the cat", 5, "no mask in"),
        ("", 5, "no mask in"),
        ("[MASK]", 0, "best is how many"),
        ("[MASK] " * 70, 5, "72 tokens, and the model reads 64"),
        (["[MASK]", 3], 5, "fill takes texts"),
    ]:
        with pytest.raises(ClearheadError, match=said):
            model.fill(text, best)
    own = train_tokenizer("characters", ["the cat"], vocab_size=64)
    sizes = {"vocab_size": own.vocab_size, "n_layers": 1, "d_model": 16, "n_heads": 2}
    decoder = ch.build("gpt2", **sizes)
    decoder.tokenizer = own
    with pytest.raises(ClearheadError, match="masked_lm head"):
        decoder.fill("the [MASK]")
    bert = ch.build("bert", **sizes)
    bert.tokenizer = own
    if own.mask_id is None:
        with pytest.raises(ClearheadError, match="no mask token"):
            bert.fill("the [MASK]")
