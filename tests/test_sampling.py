"""Drawing: equal to transformers' warpers, and frequencies that are the distribution."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as theirs

from clearhead.errors import ClearheadError
from clearhead.generate.sampling import Sampling, best, best_few, best_log_p, choose, probabilities

CASES = [
    {},
    {"temperature": 0.6},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"typical": 0.7},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05},
    {"top_k": 15, "typical": 0.6},
    {"temperature": 2.5, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "typical": 0.8},
]


def warped(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical=1.0):
    """The reference, in the order of `transformers.generate`."""
    chain = LogitsProcessorList([theirs.TemperatureLogitsWarper(float(temperature))])
    if top_k:
        chain.append(theirs.TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(theirs.TopPLogitsWarper(top_p))
    if min_p:
        chain.append(theirs.MinPLogitsWarper(min_p))
    if typical < 1:
        chain.append(theirs.TypicalLogitsWarper(typical))
    return chain(None, logits.clone()).softmax(dim=-1)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_probabilities_are_those_of_transformers(case, seed):
    logits = 3 * torch.randn(5, 61, generator=torch.Generator().manual_seed(seed))
    p = probabilities(logits, **case)
    torch.testing.assert_close(p, warped(logits, **case))
    assert ((p == 0) == (warped(logits, **case) == 0)).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_does_not_know_its_neighbours(case):
    logits = 3 * torch.randn(4, 31)
    each = torch.cat([probabilities(row, **case) for row in logits.split(1)])
    assert torch.equal(probabilities(logits, **case), each)
    dice = [torch.Generator().manual_seed(i) for i in range(4)]
    together = choose(logits, **{"temperature": 1.0} | case, dice=dice)
    for i, row in enumerate(logits.split(1)):
        own = torch.Generator().manual_seed(i)
        assert choose(row, **{"temperature": 1.0} | case, dice=own) == together[i]


@pytest.mark.parametrize("case", [case for case in CASES if "top_p" in case], ids=str)
def test_a_large_vocabulary_is_not_sorted_and_gives_the_same(case):
    logits = torch.randn(3, 9000) * torch.tensor(
        [[6.0], [3.0], [0.1]]
    )  # the last: nearly all count
    for rows in (logits, logits[:2]):
        torch.testing.assert_close(probabilities(rows, **case), warped(rows, **case))
    dice = [torch.Generator().manual_seed(i) for i in range(3)]
    together = choose(logits, **{"temperature": 1.0} | case, dice=dice)
    for i, row in enumerate(logits.split(1)):
        own = torch.Generator().manual_seed(i)
        assert choose(row, **{"temperature": 1.0} | case, dice=own) == together[i]


# The quantile 0.999 of chi-square, by degrees of freedom.
CHI = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 8: 26.12, 9: 27.88}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_frequencies_are_the_distribution(case):
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, 1.5, 0.2, -0.3, 0.9, -torch.inf]])
    dice, count = torch.Generator().manual_seed(0), 20000
    draws = choose(logits.expand(count, -1), **{"temperature": 1.0} | case, dice=dice)
    seen = draws.bincount(minlength=10)
    p = probabilities(logits, **case)[0]
    kept = p > 0
    assert (seen[~kept] == 0).all()
    expected = p[kept] * count
    chi_square = ((seen[kept] - expected) ** 2 / expected).sum()
    freedom = int(kept.sum()) - 1
    assert freedom == 0 or chi_square < CHI[freedom]


def test_temperature_0_is_the_best_token_and_ties_stay_few():
    logits = torch.tensor([[3.0, 3.0, 1.0, 0.0]])
    assert choose(logits, temperature=0.0).tolist() == [0]
    assert sorted(probabilities(logits, top_k=1)[0].tolist()) == [0.0, 0.0, 0.0, 1.0]
    assert (probabilities(logits, top_p=0.4)[0] > 0).sum() == 1
    assert probabilities(torch.tensor([[5.0, 1.0]]), 1e-40)[0].tolist() == [1.0, 0.0]
    assert probabilities(logits, min_p=1.0)[0].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert (probabilities(logits, typical=1e-6)[0] > 0).sum() == 1
    assert (probabilities(logits, top_k=99)[0] > 0).all()


def test_half_precision_is_drawn_in_full_precision():
    logits = torch.randn(2, 9, dtype=torch.bfloat16)
    for case in CASES:
        assert torch.equal(probabilities(logits, **case), probabilities(logits.float(), **case))


def test_samples_of_a_seed_differ_and_the_first_is_the_seed_itself():
    sampling = Sampling(temperature=1.0, seed=5)
    states = [sampling.dice(i).initial_seed() for i in range(3)]
    assert states[0] == 5
    assert len({*states, Sampling(temperature=1.0, seed=6).dice(0).initial_seed()}) == 4
    assert Sampling(seed=5).dice() is None
    assert Sampling(temperature=1.0).dice() is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"typical": 0.0}, "typical is 0"),
    ],
)
def test_settings_that_mean_nothing(settings, said):
    with pytest.raises(ClearheadError, match=said):
        choose(torch.zeros(1, 3), **{"temperature": 1.0} | settings)
    with pytest.raises(ClearheadError, match=said):
        Sampling(**settings)


@pytest.mark.parametrize("temperature", [1e-30, 1e-50, 5e-324])
def test_hardly_any_temperature_is_the_best_token(temperature):
    logits = torch.tensor([[1.0, 5.0, 2.0, -torch.inf]])
    assert probabilities(logits, temperature).tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert choose(logits, temperature).tolist() == [1]


def test_nothing_is_drawn_at_temperature_0():
    with pytest.raises(ClearheadError, match="nothing is drawn"):
        probabilities(torch.zeros(1, 3), temperature=0.0)


@pytest.mark.parametrize("size", [37, 6000, 32_000, 50_257])
@pytest.mark.parametrize("k", [1, 8, 50])
def test_the_best_few_are_those_of_topk(size, k):
    k = min(k, size)
    x = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(size + k))
    x[0, 0, -1] = 9.0  # behind the last whole part
    x[1] = -torch.inf
    x[1, :, :k] = torch.arange(float(k))
    values, indices = best_few(x, k)
    expected = x.topk(k, dim=-1)
    assert values.equal(expected.values)
    assert indices.equal(expected.indices)


@pytest.mark.parametrize("never", [(), (3, 0)])
@pytest.mark.parametrize(("rows", "size"), [(1, 37), (5, 6000), (3, 32_000), (2, 50_257)])
def test_the_best_few_by_log_probability(rows, size, never):
    logits = 5 * torch.randn(rows, size, generator=torch.Generator().manual_seed(size))
    logits[0, -1] = 40.0
    logits[-1, 5:9] = -torch.inf
    logits[:, 3] += 30.0  # where it may not be chosen it still has its probability
    expected = logits.double().log_softmax(dim=1)
    expected[:, list(never)] = -torch.inf
    expected = expected.topk(8, dim=1)
    before = logits.clone()
    values, indices = best_log_p(logits, 8, never)
    assert logits.equal(before)
    torch.testing.assert_close(values.double(), expected.values, rtol=1e-5, atol=1e-5)
    assert indices.equal(expected.indices)


@pytest.mark.parametrize("size", [37, 50_257])
def test_nothing_may_be_chosen(size):
    values, _ = best_log_p(torch.randn(2, size), 4, range(size))
    assert values.isneginf().all()
    logits = torch.full((1, size), -torch.inf)
    logits[0, 0], logits[0, -9] = 1.0, torch.nan  # and the one number may not be chosen
    with pytest.raises(ClearheadError, match="not numbers"):
        best_log_p(logits, 4, [0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [7, -1])
@pytest.mark.parametrize("size", [37, 50_257])
def test_a_logit_that_is_no_number_is_refused(size, place, bad):
    logits = torch.randn(2, size)
    logits[1, place] = bad
    with pytest.raises(ClearheadError, match="not numbers"):
        best_log_p(logits, 4)


def test_the_best_token_is_torch_s_and_the_first_of_equal_ones():
    logits = torch.randn(5, 1000)
    logits[1, [7, 300]] = 50.0
    assert best(logits).tolist() == logits.argmax(dim=-1).tolist()
    assert best(logits)[1] == 7
    assert best(logits.bfloat16()).shape == (5,)
    for wrong in (torch.nan, torch.inf):
        for kind in (torch.float32, torch.bfloat16):
            damaged = logits.to(kind)
            damaged[3, 4] = wrong
            with pytest.raises(ClearheadError, match="not numbers"):
                best(damaged)
