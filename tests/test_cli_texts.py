"""The commands that use a model: its own answers, a line each, from arguments, files and standard
input.
"""

from __future__ import annotations

import io
import json
import re
import resource
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import clearhead as ch
import tiny
from clearhead.cli.main import main
from clearhead.cli.notices import notices
from clearhead.measure import roofs
from clearhead.text.trained import train_tokenizer

TEXTS = ["the cat sat", "on the mat and the dog", "the log"]
LABELS = ["bad", "good", "odd"]
SIZES = {"n_layers": 1, "d_model": 16, "n_heads": 2, "max_len": 64}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of tiny random models by what they are for."""
    roles = {"unk": "[UNK]", "pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    tokenizer = train_tokenizer("bpe", TEXTS, vocab_size=275, special_tokens=roles)
    heads = {
        "embed": ("bert", {"kind": "pooling", "mode": "mean", "normalise": True}),
        "classify": ("bert", {"kind": "classification", "n_labels": 3}),
        "tag": ("bert", {"kind": "tagging", "n_labels": 3}),
        "answer": ("bert", "span"),
        "fill": ("bert", "masked_lm"),
        "translate": ("transformer", None),
        "generate": ("gpt2", None),
    }
    found = {}
    for name, (family, head) in heads.items():
        more = {} if head is None else {"head": head}
        model = ch.build(family, seed=0, vocab_size=tokenizer.vocab_size, **SIZES, **more)
        tiny.noisy(model.net)
        model.net.eval()
        model.tokenizer = tokenizer
        if name in ("classify", "tag"):
            model.companions["labels.json"] = LABELS
        if name == "translate":
            model.companions["generation_config.json"] = {"decoder_start_token_id": 1}
        found[name] = tmp_path_factory.mktemp("models") / name
        model.save(found[name])
    return found


def said(capsys, *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_translations_come_a_line_each_in_order(models, capsys, tmp_path, monkeypatch):
    folder = str(models["translate"])
    right = ch.load(folder).translate(TEXTS, beams=2)
    out = said(capsys, "translate", folder, *TEXTS, "--beams", "2")
    assert out.splitlines() == [text.replace("\n", " ") for text in right]
    (tmp_path / "texts").write_text("\n".join(TEXTS[:2]) + "\n\n" + TEXTS[2])
    words = ("translate", folder, "--file", str(tmp_path / "texts"), "--beams", "2")
    assert said(capsys, *words) == out
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(TEXTS)))
    lines = said(capsys, "translate", folder, "--beams", "2", "--json").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"source": text, "translation": made} for text, made in zip(TEXTS, right, strict=True)
    ]


def test_many_texts_come_in_order(models, capsys, monkeypatch):
    monkeypatch.setattr("clearhead.cli.texts.CHUNK", 2)
    monkeypatch.setattr("clearhead.cli.texts.chunks.__defaults__", (2,))
    folder = str(models["classify"])
    out = said(capsys, "classify", folder, *TEXTS)
    assert [line.partition("\t")[2] for line in out.splitlines()] == TEXTS


def test_empty_lines_are_left_out_with_a_word(models, capsys, tmp_path):
    folder = str(models["classify"])
    (tmp_path / "in.txt").write_text("the cat\n\n \nthe dog\n")
    main(["classify", folder, "--file", str(tmp_path / "in.txt")])
    both = capsys.readouterr()
    assert len(both.out.splitlines()) == 2
    assert "2 empty lines were left out" in both.err


def test_speed_is_said_on_the_side(models, capsys):
    assert main(["translate", str(models["translate"]), "the cat", "--stats"]) == 0
    both = capsys.readouterr()
    assert "1 texts" in both.err
    assert "tokens/s, 5 beams" in both.err
    assert "tokens/s" not in both.out
    words = {"answer": ["who sat?", "--context", "the cat sat"], "fill": ["the [MASK] sat"]}
    for name in ("classify", "embed", "tag", "fill", "answer"):
        given = [name, str(models[name]), *words.get(name, ["the cat"])]
        assert main([*given, "--stats"]) == 0
        both = capsys.readouterr()
        assert re.search(r"1 text, \d+\.\d\d s: [\d.]+/s", both.err)
        assert "/s" not in both.out.replace("/sat", "")
        assert main(given) == 0
        assert "/s" not in capsys.readouterr().err


def test_vectors_and_cosines(models, capsys, tmp_path):
    folder = str(models["embed"])
    right = ch.load(folder).embed(TEXTS)
    table = said(capsys, "embed", folder, *TEXTS).splitlines()
    assert [float(cell) for cell in table[2].split()[-3:]] == pytest.approx(
        (right @ right.T)[1].tolist(), abs=6e-4
    )
    lines = said(capsys, "embed", folder, *TEXTS, "--json").splitlines()
    vectors = torch.tensor([json.loads(line)["vector"] for line in lines])
    torch.testing.assert_close(vectors, right)
    numbers = said(capsys, "embed", folder, "the cat sat").split()
    assert [float(x) for x in numbers] == pytest.approx(right[0].tolist(), abs=1e-4)
    assert said(capsys, "embed", folder, *TEXTS, "--out", str(tmp_path / "v.npy")) == ""
    assert (tmp_path / "v.npy").stat().st_mode & 0o777 == 0o644
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), right.numpy(), atol=1e-6)


def test_vectors_replace_a_file_only_if_that_is_asked_for(models, capsys, tmp_path):
    out = tmp_path / "v.npy"
    out.write_text("something else")
    words = ["embed", str(models["embed"]), "the cat sat", "--out", str(out)]
    assert main(words) == 2
    assert "is there already" in capsys.readouterr().err
    assert out.read_text() == "something else"
    assert main([*words, "--overwrite"]) == 0
    assert np.load(out).shape == (1, 16)


def test_vectors_on_a_full_disk(models, capsys, tmp_path):
    """A limit on the size of files is as good as a full disk: writing fails in the middle."""
    out = tmp_path / "v.npy"
    out.write_bytes(b"before")
    words = ["embed", str(models["embed"]), *TEXTS * 700, "--out", str(out), "--overwrite"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        assert main(words) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    err = capsys.readouterr().err
    assert "v.npy could not be written (File too large); what was there before is as it was" in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["v.npy"]
    assert out.read_bytes() == b"before"


def test_labels_with_their_probability(models, capsys):
    folder = str(models["classify"])
    right = ch.load(folder).classify("the cat sat")
    label, value = next(iter(right.items()))
    assert said(capsys, "classify", folder, "the cat sat") == f"{label} {value:.3f}\n"
    assert said(capsys, "classify", folder, "the cat sat", "--best", "3").count(".") == 3
    pair = ch.load(folder).classify(("the cat", "the dog"))
    for words in (["the cat", "--second", "the dog"], ["the cat\tthe dog"]):
        found = json.loads(said(capsys, "classify", folder, *words, "--json"))
        assert found["labels"] == pytest.approx(pair)


def test_a_run_that_learned_single_texts_judges_no_pairs(models, capsys, tmp_path):
    columns = {"kind": "classification", "text": "text", "label": "label"}
    runs = {}
    for name, more in (("single", {}), ("pairs", {"second": "other"})):
        runs[name] = str(tmp_path / name)
        shutil.copytree(models["classify"], tmp_path / name / "model")
        data = {"source": "texts.csv", "objective": columns | more}
        recipe = {"data": data, "model": {"family": "bert"}}
        (tmp_path / name / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["classify", runs["single"], "the cat", "--second", "the dog"]) == 2
    assert "leave --second out" in capsys.readouterr().err
    model = ch.load(models["classify"])
    for run, words, asked in [
        ("single", ["the cat\tthe dog"], "the cat\tthe dog"),
        ("pairs", ["the cat\tthe dog"], ("the cat", "the dog")),
        ("pairs", ["the cat", "--second", "the dog"], ("the cat", "the dog")),
    ]:
        found = json.loads(said(capsys, "classify", runs[run], *words, "--json"))
        assert found["labels"] == pytest.approx(model.classify(asked))


def test_words_with_their_tags(models, capsys):
    folder = str(models["tag"])
    right = ch.load(folder).tag("the cat sat")
    assert said(capsys, "tag", folder, "the cat sat").split() == [f"{w}/{t}" for w, t in right]
    found = json.loads(said(capsys, "tag", folder, "the cat sat", "--json"))
    assert list(zip(found["words"], found["tags"], strict=True)) == right


def test_answers_are_pieces_of_the_text(models, capsys, tmp_path, monkeypatch):
    folder, context = str(models["answer"]), "the dog sat on the log"
    right = ch.load(folder).answer("what sat ?", context)
    assert said(capsys, "answer", folder, "what sat ?", "--context", context) == right.text + "\n"
    (tmp_path / "c.txt").write_text(context + "\n")
    found = json.loads(
        said(capsys, "answer", folder, "what sat ?", "--file", str(tmp_path / "c.txt"), "--json")
    )
    assert (found["text"], found["start"], found["end"]) == (right.text, right.start, right.end)
    monkeypatch.setattr("sys.stdin", io.StringIO(context))
    assert said(capsys, "answer", folder, "what sat ?") == right.text + "\n"


def test_masks_are_filled(models, capsys):
    folder, text = str(models["fill"]), "the [MASK] sat on the [MASK]"
    right = ch.load(folder).fill(text, best=2)
    lines = said(capsys, "fill", folder, text, "--best", "2", "--json").splitlines()
    for number, (line, candidates) in enumerate(zip(lines, right, strict=True), 1):
        found = json.loads(line)
        assert found["mask"] == number
        assert [one["id"] for one in found["candidates"]] == [one.id for one in candidates]
        assert [one["token"] for one in found["candidates"]] == [one.token for one in candidates]
    plain = said(capsys, "fill", folder, "the [MASK] sat", "--best", "3").splitlines()
    assert len(plain) == 3


def test_tokens_that_do_not_print_are_shown(models, capsys):
    folder, tokenizer = str(models["fill"]), ch.load(models["fill"]).tokenizer
    words = ("fill", folder, "the [MASK] sat", "--best", str(tokenizer.vocab_size))
    found = json.loads(said(capsys, *words, "--json"))["candidates"]
    for one in found:  # without blanks around it, but for one that is nothing else
        whole = tokenizer.decode([one["id"]], special=True)
        assert one["token"] == (whole.strip(" ") or whole)
    lines = said(capsys, *words).split("\n")[:-1]
    assert len(lines) == tokenizer.vocab_size
    (newline,) = (i for i, one in enumerate(found) if one["token"] == "\n")
    assert lines[newline].split()[1] == r"\n"
    (blank,) = (i for i, one in enumerate(found) if one["token"] == " ")
    assert lines[blank][7:10] == "' '"


def test_texts_are_written_as_the_model_writes_them(models, capsys, monkeypatch):
    folder = str(models["generate"])
    model = ch.load(folder)
    settings = {"max_new_tokens": 12, "temperature": 0.7, "top_k": 5, "seed": 3}
    words = ("--max-new-tokens", "12", "--temperature", "0.7", "--top-k", "5", "--seed", "3")
    right = model.generate("the cat", **settings)
    assert said(capsys, "generate", folder, "the cat", *words) == f"the cat{right}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n"))
    assert said(capsys, "generate", folder, *words) == f"the cat{right}\n"
    lines = said(capsys, "generate", folder, "the cat", *words, "--n", "2", "--json").splitlines()
    both = model.generate("the cat", n=2, **settings)
    assert [json.loads(line)["text"] for line in lines] == both
    several = said(capsys, "generate", folder, "the cat", *words, "--n", "2")
    assert several == f"--- 1\nthe cat{both[0]}\n--- 2\nthe cat{both[1]}\n"


def test_what_came_with_the_model_holds_in_the_shell(models, capsys, tmp_path):
    model = ch.load(models["generate"])
    ours = {"do_sample": True, "top_k": 1, "max_new_tokens": 7}
    model.companions["generation_config.json"] = ours
    model.save(tmp_path / "own")
    words = ("generate", str(tmp_path / "own"), "the cat", "--seed", "1")
    best = model.generate("the cat", max_new_tokens=7)
    assert said(capsys, *words) == f"the cat{best}\n"
    assert said(capsys, *words, "--max-new-tokens", "9", "--top-k", "0") != f"the cat{best}\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_no_text(models, capsys, monkeypatch, errors):
    given = io.TextIOWrapper(io.BytesIO(b"the cat\n\xff\xfe\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", given)
    assert main(["embed", str(models["embed"])]) == 2
    assert "Standard input is not UTF-8" in capsys.readouterr().err


def test_other_settings_of_generate(models, capsys, tmp_path):
    folder = str(models["generate"])
    model = ch.load(folder)
    right = model.generate("the cat", beams=3, max_new_tokens=5)
    words = ("generate", folder, "the cat", "--max-new-tokens", "5")
    assert said(capsys, *words, "--set", "beams=3") == f"the cat{right}\n"
    # What has to match stands alone: behind its prompt it would not.
    found = said(capsys, *words, "--seed", "1", "--set", "regex=[ab]{2}[01]")
    assert re.fullmatch(r"[ab]{2}[01]\n", found)
    (tmp_path / "schema.json").write_text('{"enum": [17]}')
    schema = f"schema={tmp_path / 'schema.json'}"
    assert said(capsys, *words, "--seed", "1", "--set", schema) == "17\n"
    both = said(capsys, *words, "--seed", "1", "--n", "2", "--set", schema)
    assert both == "--- 1\n17\n--- 2\n17\n"
    assert main([*words, "--set", "beam=3"]) == 2
    assert 'no setting "beam"' in capsys.readouterr().err


def test_a_search_gives_all_its_tokens_at_once(models, capsys):
    words = ["generate", str(models["generate"]), "the cat", "--max-new-tokens", "5", "--stats"]
    assert main([*words, "--set", "beams=2"]) == 0
    said = capsys.readouterr().err
    assert re.search(r"\d new: after \d+\.\d\d s$", said.strip())


def test_the_speed_and_a_full_context_are_said_on_the_side(models, capsys, monkeypatch):
    bandwidth = roofs.Report(roofs=roofs.Roofs(bandwidth=10.0))
    monkeypatch.setattr(roofs, "measure", lambda probes: bandwidth)
    words = ["generate", str(models["generate"]), "the cat", "--max-new-tokens", "80", "--stats"]
    assert main([*words, "--temperature", "0"]) == 0
    err = capsys.readouterr().err
    assert "clearhead: The text has come to the model's last position (64)" in err
    assert re.search(r"80 new: .* tokens/s: \d+% of what the memory allows \(fp32, ", err)


def test_what_a_search_does_not_know_is_null(models, capsys):
    words = ("generate", str(models["generate"]), "the cat", "--max-new-tokens", "5", "--json")
    found = json.loads(said(capsys, *words, "--set", "beams=2"))
    assert found["score"] < 0
    for name in ("tokens_a_second", "log_probabilities", "best"):
        assert found[name] is None
    drawn = json.loads(said(capsys, *words, "--seed", "1"))
    assert len(drawn["log_probabilities"]) >= 5
    assert drawn["tokens_a_second"] > 0


def test_the_temperature_of_the_command_gives_way_to_a_search(models, capsys):
    folder = str(models["generate"])
    words = ["generate", folder, "the cat", "--max-new-tokens", "6", "--seed", "1"]
    right = ch.load(folder).generate("the cat", max_new_tokens=6, seed=1, temperature=0.8)
    assert said(capsys, *words) == f"the cat{right}\n"
    for search in ("beams=2", "contrast=0.5"):
        assert main([*words, "--set", search, "--temperature", "0"]) == 0
        capsys.readouterr()
        for drawn in (["--set", "temperature=0.8"], ["--temperature", "0.8"]):
            assert main([*words, "--set", search, *drawn]) == 2
            assert "draws nothing: leave temperature out" in capsys.readouterr().err


def test_a_smaller_model_and_the_number_of_texts_are_settings_too(models, capsys):
    folder = str(models["generate"])
    words = ("generate", folder, "the cat", "--max-new-tokens", "6", "--temperature", "0")
    right = said(capsys, *words)
    assert said(capsys, *words, "--set", f"draft={folder}") == right
    assert said(capsys, *words, "--set", "n=2") == said(capsys, *words, "--n", "2")


@pytest.fixture
def talker(models, tmp_path):
    """A model with an end token and a chat template."""
    roles = {"eos": "</s>"}
    tokenizer = train_tokenizer("bpe", TEXTS, vocab_size=275, special_tokens=roles)
    tokenizer.chat_template = (
        "{% for one in messages %}<{{ one.role }}> {{ one.content }}: {% endfor %}"
    )
    model = ch.build("gpt2", seed=0, vocab_size=tokenizer.vocab_size, **SIZES)
    model.tokenizer = tokenizer
    model.save(tmp_path / "talker")
    return str(tmp_path / "talker")


def test_a_text_that_ends_at_once_is_told_so(talker, models, capsys):
    words = ["generate", talker, "the cat", "--set", 'logit_bias={"</s>": 1000}']
    assert main(words) == 0
    both = capsys.readouterr()
    assert both.out == "the cat\n"
    assert "The text has not one new token: the end came at once. This model was" in both.err
    assert main([*words, "--n", "2", "--chat"]) == 0
    both = capsys.readouterr()
    assert "Text 2 has not one new token: the end came at once.\n" in both.err
    assert main(["generate", talker, "the cat", "--max-new-tokens", "3"]) == 0
    assert "not one new token" not in capsys.readouterr().err


def test_a_prompt_as_a_message(talker, models, capsys):
    message = [{"role": "user", "content": "the cat"}]
    right = ch.load(talker).chat(message, max_new_tokens=6)
    words = ("generate", talker, "the cat", "--max-new-tokens", "6", "--temperature", "0", "--chat")
    assert said(capsys, *words) == right + "\n"
    assert json.loads(said(capsys, *words, "--json"))["text"] == right
    assert main(["generate", str(models["generate"]), "the cat", "--chat"]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_a_text_that_does_not_match_yet_is_told_so(models, capsys):
    words = ["generate", str(models["generate"]), "the cat", "--max-new-tokens", "5", "--set"]
    assert main([*words, "regex=[ab]{40}"]) == 0
    both = capsys.readouterr()
    assert re.fullmatch("[ab]{5,39}\n", both.out)
    assert "The text ends at the limit of 5 tokens and does not match the regex yet" in both.err
    assert main([*words, "regex=[ab]+"]) == 0  # it could go on, and matches as it is
    assert "does not match" not in capsys.readouterr().err


def test_a_missing_tokeniser_is_named(models, capsys, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(models["generate"], bare)
    (bare / "tokenizer.json").unlink()
    (bare / "tokenizer_config.json").unlink()
    for verb in ("generate", "embed"):
        assert main([verb, str(bare), "a"]) == 2
        assert f"put the tokenizer.json that it was trained with into {bare}" in (
            capsys.readouterr().err
        )


def test_a_notice_waits_for_the_end_of_the_line(capsys):
    with notices() as aside:
        warnings.warn("before", stacklevel=1)
        assert capsys.readouterr().err == "clearhead: before\n"
        aside.waiting = True
        warnings.warn("within", stacklevel=1)
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "clearhead: within\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["translate", "translate"], "There is no text"),
        (["embed", "embed", "a", "--file", "b"], "given twice"),
        (["classify", "classify", "a", "--best", "0"], "1 or more"),
        (["classify", "embed", "a"], "Classifying takes a model with a classification head"),
        (["answer", "answer", "what ?", "--context", " "], "no text to look for"),
        (["answer", "answer", "a ?", "--context", "b", "--file", "c"], "given twice"),
        (["tag", "tag", "--file", "none.txt"], 'no file or folder "none.txt"'),
        (["generate", "generate", "a", "--file", "b"], "given twice"),
        (["generate", "generate", "a", "--n", "0"], "1 or more, not 0"),
        (["generate", "generate", "a", "--set", "schema=none.json"], "no file with a JSON schema"),
        (["fill", "fill", "no mask here"], "There is no mask"),
        (["generate", "generate", "one", "two"], 'quotes around it, "one two"'),
        (["generate", "generate", "a", "--set", "n=0"], "1 or more, not 0"),
        (["generate", "generate", "a", "--seed", "1", "--set", "seed=2"], "seed: given twice"),
        (["generate", "generate", "a", "--n", "2", "--set", "n=2"], "n: given twice"),
        (["generate", "generate", "a", "--n", "3", "--set", "beams=2"], "n is 3 and beams 2"),
        (["generate", "generate", "a", "--set", "contrast=2"], "contrast is a number from 0"),
        (["generate", "generate", "a", "--set", "draft=3"], "draft=MODEL, not 3"),
        (["generate", "generate", "a", "--set", "draft=./none"], "no model at ./none"),
        (["generate", "generate", "a", "--set", "constraint=a"], "in Python only"),
        (["translate", "translate", "a", "--beams", "0"], "beams is a whole number from 1 up to"),
        (["translate", "translate", "a", "--beams", "100000"], "tokens, not 100000."),
        (["embed", "embed", "a", "--out", "none/a.npy"], "in a folder that is there"),
        (["embed", "embed", "a", "--out", "."], "name a file"),
        (["translate", "embed", "a"], "Translating takes an encoder-decoder"),
    ],
)
def test_what_cannot_be_done(models, capsys, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    verb, model, *rest = words
    assert main([verb, str(models[model]), *rest]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("verb", ["embed", "classify"])
def test_texts_that_are_cut_are_told_beside_the_output(models, capsys, verb):
    assert main([verb, str(models[verb]), "the dog " * 100, "a cat"]) == 0
    out, err = capsys.readouterr()
    assert "clearhead: 1 of 2 texts have more than the 64 tokens that the model reads" in err
    assert "more than" not in out


def test_a_text_in_pieces_of_json(models, capsys):
    words = [str(models["generate"]), "the cat", "--max-new-tokens", "6", "--temperature", "0"]
    assert main(["generate", *words, "--json", "--stream"]) == 0
    *pieces, whole = map(json.loads, capsys.readouterr().out.splitlines())
    assert len(pieces) >= 1
    assert "".join(piece["piece"] for piece in pieces) == whole["text"]
    assert len(whole["ids"]) == 6
    assert main(["generate", *words, "--stream"]) == 0
    assert capsys.readouterr().out == "the cat" + whole["text"] + "\n"
    assert main(["generate", *words, "--stream", "--n", "2"]) == 2
    assert "single text" in capsys.readouterr().err
