"""What a model does with texts: greedy and sampled decoding, and what is refused."""

import pytest
import torch

import clearhead as ch
import tiny
from clearhead.errors import ClearheadError
from clearhead.generate.decode import Sampling, decode_tokens
from clearhead.text.trained import train_tokenizer

TEXT = "the cat sat on the mat and the dog sat on the log"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer("characters", [TEXT], vocab_size=64)


def gpt(tokenizer, **more):
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 4, "max_len": 32}
    model = ch.build("gpt2", seed=0, vocab_size=tokenizer.vocab_size, **sizes | more)
    for parameter in model.net.parameters():
        parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    model.tokenizer = tokenizer
    return model


def test_greedy_decoding_is_the_best_token_each_time(tokenizer):
    model = gpt(tokenizer)
    ids = tokenizer.encode("the cat")
    with torch.inference_mode(), model.net.at_rest():
        for _ in range(12):
            ids.append(int(model.net(torch.tensor([ids]))[0, -1].argmax()))
    found = list(decode_tokens(model.net, tokenizer.encode("the cat"), Sampling(12), 32))
    assert found == ids[-12:]
    assert model.generate("the cat", max_new_tokens=12) == tokenizer.decode(found)


def test_dropout_does_not_act_and_training_goes_on_afterwards(tokenizer):
    model = gpt(tokenizer, dropout=0.5)
    model.net.train()
    assert len({model.generate("the", max_new_tokens=10) for _ in range(5)}) == 1
    assert model.net.training


def test_decoding_goes_on_behind_the_last_position_with_half_of_its_context(tokenizer):
    """As if it had been asked again with the last five tokens of ten."""
    net = gpt(tokenizer, max_len=10).net
    whole = list(decode_tokens(net, [1, 2, 3], Sampling(20), 10))
    assert len(whole) == 20
    first = list(decode_tokens(net, [1, 2, 3], Sampling(7), 10))
    assert whole[:7] == first
    again = list(decode_tokens(net, [1, 2, 3, *first][-5:], Sampling(5), 10))
    assert whole[7:12] == again


def test_an_encoder_decoder_ends_where_its_positions_do(tokenizer):
    sizes = {"n_layers": 1, "d_model": 16, "n_heads": 2, "max_len": 10}
    net = ch.build("transformer", vocab_size=20, seed=0, **sizes).net.eval()
    with torch.inference_mode():
        memory = net.encode(torch.tensor([[4, 5, 6]]))
    assert len(list(decode_tokens(net, [0], Sampling(100), 10, memory))) == 9


def test_a_stop_id_ends_the_text_and_is_not_part_of_it(tokenizer):
    model = gpt(tokenizer)
    whole = list(decode_tokens(model.net, [1, 2, 3], Sampling(10), 32))
    stop = frozenset({whole[4]})
    first = whole.index(whole[4])
    assert list(decode_tokens(model.net, [1, 2, 3], Sampling(10, stop=stop), 32)) == whole[:first]
    never = list(decode_tokens(model.net, [1, 2, 3], Sampling(10, never=stop), 32))
    assert whole[4] not in never


def test_seeds_repeat_and_differ(tokenizer):
    model = gpt(tokenizer)
    settings = {"max_new_tokens": 20, "temperature": 1.0}
    texts = [model.generate("the", seed=seed, **settings) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_an_encoder_decoder_starts_from_its_start_token(tokenizer):
    model = ch.build(
        "t5", seed=0, vocab_size=tokenizer.vocab_size, n_layers=1, d_model=16, n_heads=2
    )
    model.tokenizer = tokenizer
    if tokenizer.pad_id is None:
        with pytest.raises(ClearheadError, match="which token this model's targets start with"):
            model.generate("the cat")
    model.companions["generation_config.json"] = {"decoder_start_token_id": 7}
    memory = model.net.eval().encode(torch.tensor([tokenizer.encode("the cat")]))
    found = list(decode_tokens(model.net, [7], Sampling(4), 32, memory))
    assert model.generate("the cat", max_new_tokens=4) == tokenizer.decode(found)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"max_new_tokens": 0}, "one token at least"),
        ({"max_new_tokens": "3"}, "must be a whole number"),
        ({"beems": 2}, "no setting"),
        ({"temperatur": 2}, 'Did you mean "temperature"'),
        ({"stop": ""}, "stop string is empty"),
        ({"stop": ["a", ""]}, "stop string is empty"),
        ({"stop": [3]}, "stop string is text"),
        ({"stop": None}, "stop is a text, or a list of texts, not None"),
        ({"stop": 5}, "stop is a text, or a list of texts, not 5"),
        ({"beams": 0}, "beams is a whole number from 1"),
        ({"constraint": lambda: 3}, "constraint made 3"),
        ({"n": 0}, "n is how many"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"log_probabilities": 3}, "details=True"),
        ({"log_probabilities": -1, "details": True}, "log_probabilities is how many"),
        ({"banned": [""]}, "banned text is empty"),
        ({"banned": None}, "banned is a list of texts or ids, not None"),
        ({"banned": [10**6]}, "Tokens are named that are not there"),
        ({"logit_bias": {"the cat": 1.0}}, "logit_bias is for single tokens"),
        ({"logit_bias": 3}, "logit_bias is a table"),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, "at least cannot be more than at most"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram is a whole number"),
    ],
)
def test_settings_that_mean_nothing(tokenizer, settings, said, unchecked):
    with pytest.raises(ClearheadError, match=said):
        gpt(tokenizer).generate("the", **settings)


def test_what_cannot_write_is_told_so(tokenizer, unchecked):
    bert = ch.build("bert", vocab_size=64, n_layers=1, d_model=16, n_heads=2)
    bert.tokenizer = tokenizer
    for call in (bert.generate, lambda text: bert.chat([{"role": "user", "content": text}])):
        with pytest.raises(ClearheadError, match="encoder and cannot generate"):
            call("the")
    with pytest.raises(ClearheadError, match="pooling head"):
        bert.embed("the")
    tagger = gpt(tokenizer, head={"kind": "tagging", "n_labels": 3})
    with pytest.raises(ClearheadError, match="no language-model head"):
        tagger.generate("the")
    small = ch.build("gpt2", vocab_size=4, n_layers=1, d_model=16, n_heads=2)
    small.tokenizer = tokenizer
    with pytest.raises(ClearheadError, match="outside the vocabulary"):
        small.generate("the cat")
    with pytest.raises(ClearheadError, match="no tokenizer"):
        ch.build("gpt2", vocab_size=4, n_layers=1, d_model=16, n_heads=2).generate("a")
    with pytest.raises(ClearheadError, match="listens"):
        small.transcribe(torch.zeros(16000))
    for call in ("the cat sat", ["a", "the cat sat"]):
        with pytest.raises(ClearheadError, match="A prompt has 11 tokens, and the model 4"):
            gpt(tokenizer, max_len=4).generate(call)
    for call, said in [([], "no prompts"), (["a", 3], "prompt is text"), ("", "prompt is empty")]:
        with pytest.raises(ClearheadError, match=said):
            gpt(tokenizer).generate(call)
    for settings in ({"n": 2}, {}):
        with pytest.raises(ClearheadError, match="stream writes one text"):
            list(gpt(tokenizer).stream("the" if settings else ["the"], **settings))


def test_an_empty_prompt_begins_a_text():
    own = train_tokenizer("bytes", [TEXT])
    model = gpt(own)
    begin = own.eos_id if own.bos_id is None else own.bos_id
    assert begin is not None
    found = list(decode_tokens(model.net, [begin], Sampling(6, stop=frozenset(own.eos_ids)), 32))
    assert model.generate("", max_new_tokens=6) == own.decode(found)
    # Special tokens that the vocabulary does not have are text like any other.
    assert isinstance(model.generate("<|im_start|>the", max_new_tokens=2), str)


def test_embeddings_do_not_depend_on_the_batch(tokenizer):
    head = {"kind": "pooling", "mode": "mean", "normalise": True}
    model = ch.build(
        "bert",
        seed=0,
        vocab_size=tokenizer.vocab_size,
        n_layers=2,
        d_model=16,
        n_heads=2,
        head=head,
    )
    model.tokenizer = tokenizer
    texts = ["the cat", "on the mat and the dog", "a"]
    together = model.embed(texts)
    torch.testing.assert_close(together, torch.cat([model.embed(text) for text in texts]))
    torch.testing.assert_close(together.norm(dim=1), torch.ones(3))


def test_angles_and_slopes_stay_in_full_precision():
    for position in ("rope", "alibi"):
        net = ch.build("gpt2", seed=0, position=position, **tiny.SIZES).net
        kind = net.stack.kinds[0]
        table = kind.rotary.frequencies if position == "rope" else kind.bias.slopes
        before = table.clone()
        net.half()
        table = kind.rotary.frequencies if position == "rope" else kind.bias.slopes
        assert table.dtype == torch.float32
        assert torch.equal(table, before)
