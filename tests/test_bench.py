"""`clearhead bench`: the speed of a model beside what the memory allows."""

from __future__ import annotations

import json

import pytest
import torch

import clearhead as ch
from clearhead.cli.main import main
from clearhead.measure import roofs
from clearhead.measure.speed import Times, Work, decoder, race

SIZES = {"n_layers": 1, "d_model": 32, "n_heads": 2, "vocab_size": 64, "max_len": 64}


@pytest.fixture
def measured(monkeypatch):
    """The machine's roofs, without measuring."""
    found = roofs.Report(roofs=roofs.Roofs(bandwidth=10.0, gemm=100.0))
    monkeypatch.setattr(roofs, "measure", lambda probes: found)


def bench(capsys, *words):
    assert main(["bench", *words]) == 0
    return capsys.readouterr().out


def test_the_best_round_counts_and_the_first_one_only_warms_up():
    seen: list[str] = []
    times = {"a": iter([(0.1, 0.1), (2.0, 5.0), (4.0, 3.0)]), "b": iter([(9.0, 9.0)] * 3)}

    def contender(name):
        def run(work):
            seen.append(name)
            return Times(*next(times[name]))

        return run

    work = Work(prompt=8, new=4, rows=1)
    first, second = race({n: contender(n) for n in "ab"}, {"a": 10**9}, work, 2, bandwidth=8.0)
    assert seen == ["a", "b", "b", "a", "a", "b"]
    assert (first.read, first.written) == (8 / 2.0, 3 / 3.0)
    assert first.share == pytest.approx(1.0 / 8.0)  # one token of a gigabyte a second, of 8
    assert second.share is None


def test_a_share_is_that_of_what_a_step_reads():
    reads = {"a": lambda: 5 * 10**8}
    given = {"a": lambda work: Times(1.0, 1.0)}, {"a": 10**9}, Work(prompt=1, new=2, rows=1)
    (found,) = race(*given, rounds=1, bandwidth=8.0, reads=reads)
    assert (found.share, found.held) == (pytest.approx(1.0 / 16.0), 10**9)


@pytest.mark.parametrize("name", ["gpt2", "transformer"])
def test_a_decoder_writes_every_token(name):
    model = ch.build(name, seed=0, **SIZES)
    steps: list[int] = []
    decode = model.net.decode
    model.net.decode = lambda ids, **more: steps.append(ids.shape[1]) or decode(ids, **more)
    decoder(model.net, 64)(Work(prompt=7, new=5, rows=2))
    assert steps == [7 if name == "gpt2" else 1, 1, 1, 1, 1]


def test_a_model_beside_the_roof(capsys, measured, tmp_path):
    ch.build("gpt2", seed=0, **SIZES).save(tmp_path / "m")
    words = (str(tmp_path / "m"), "--new", "4", "--rounds", "1", "--forms", "plain", "int8")
    found = json.loads(bench(capsys, *words, "--json"))
    speeds = {speed["name"]: speed for speed in found["speeds"]}
    assert list(speeds) == ["plain", "int8", "transformers"]
    assert speeds["int8"]["held"] < speeds["plain"]["held"] == speeds["transformers"]["held"]
    for speed in speeds.values():
        assert speed["share"] == pytest.approx(speed["written"] * speed["held"] / 10e9)
    table = bench(capsys, *words).splitlines()
    assert table[0] == "memory read 10.0 GB/s, fp32 matrix product 100 GFLOP/s"
    assert [line.split()[0] for line in table[-3:]] == list(speeds)


def test_an_encoder_reads(capsys, measured, tmp_path):
    ch.build("bert", seed=0, **SIZES).save(tmp_path / "m")
    words = (str(tmp_path / "m"), "--rows", "3", "--rounds", "1", "--forms", "plain", "--json")
    (speed,) = json.loads(bench(capsys, *words))["speeds"]
    assert speed["read"] > 0
    assert speed["written"] is speed["share"] is None


def test_the_machine_alone(capsys, measured):
    assert bench(capsys) == "memory read 10.0 GB/s, fp32 matrix product 100 GFLOP/s\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "0"], "--rows must be 1 or more"),
        (["--forms", "int2"], 'There is no form "int2"'),
        (["MODEL", "--new", "60"], "more than the model's 64 positions"),
        (["none"], "none"),
    ],
)
def test_what_cannot_be_measured(capsys, measured, tmp_path, words, message):
    ch.build("gpt2", seed=0, **SIZES).save(tmp_path / "m")
    words = [str(tmp_path / "m") if word == "MODEL" else word for word in words]
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_learnt_meanwhile():
    model = ch.build("gpt2", seed=0, dropout=0.5, **SIZES)
    model.net.train()
    before = [p.clone() for p in model.net.parameters()]
    decoder(model.net, 64)(Work(4, 3))
    assert model.net.training
    assert all(torch.equal(a, b) for a, b in zip(before, model.net.parameters(), strict=True))
