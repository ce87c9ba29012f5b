"""Weights on large pages: the same numbers in other memory."""

import mmap
import re
import sys
import weakref
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.fast import compile as compiled
from clearhead.fast import pages
from clearhead.fast.form import make_fast
from clearhead.fast.pages import CHUNK, SMALLEST, Files, LargePages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for them")
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def large_bytes():
    """What of this process is on large pages."""
    found = re.findall(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps").read_text())
    return 1024 * sum(map(int, found))


def big(**more):
    """A decoder whose weights are worth it."""
    sizes = {"vocab_size": 300, "d_model": 256, "n_layers": 2, "n_heads": 4, "max_len": 64}
    return ch.build("gpt2", seed=0, dropout=0.0, **sizes | more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int32])
def test_a_copy_has_the_same_numbers_and_memory_of_its_own(dtype):
    tensor = torch.randint(0, 200, (1001, 600)).to(dtype)
    memory = LargePages()
    copies = [memory.hold(tensor) for _ in range(3)]
    for copy in copies:
        assert copy.dtype == dtype
        assert copy.equal(tensor)
        assert copy.data_ptr() % 64 == 0
        assert copy.untyped_storage().nbytes() == tensor.nbytes  # saving it saves no more
        assert memory.hold(copy) is copy  # it is there
    assert len({tensor.data_ptr(), *(copy.data_ptr() for copy in copies)}) == 4
    copies[0].zero_()
    assert copies[1].equal(tensor)


def test_a_tensor_that_lies_otherwise_is_laid_in_rows():
    tensor = torch.randn(500, 600).T
    copy = LargePages().hold(tensor)
    assert copy.is_contiguous()
    assert copy.equal(tensor)


def test_small_tensors_stay_where_they_are():
    memory = LargePages()
    for tensor in (torch.empty(0), torch.ones(SMALLEST - 1, dtype=torch.uint8)):
        assert memory.hold(tensor) is tensor
    assert memory.hold(torch.ones(10**6, device="meta")).is_meta


def test_a_tensor_may_be_larger_than_what_is_asked_for_at_a_time():
    tensor = torch.ones(CHUNK + 5, dtype=torch.uint8)
    memory = LargePages()
    first, second = memory.hold(tensor), memory.hold(torch.full((SMALLEST,), 2, dtype=torch.uint8))
    assert first.equal(tensor)
    assert bool((second == 2).all())


def test_memory_goes_back_with_the_last_tensor_in_it():
    memory = LargePages()
    copy = memory.hold(torch.randn(300, 300))
    chunk = weakref.ref(memory._chunk)
    assert chunk() in pages._chunks
    del memory
    assert chunk() in pages._chunks
    del copy
    assert chunk() is None


def test_where_there_are_none_tensors_stay_where_they_are(monkeypatch):
    def none(*given, **more):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", none)
    tensor = torch.randn(300, 300)
    assert LargePages().hold(tensor) is tensor


def test_the_system_gives_large_pages():
    if not SWITCH.exists() or "[never]" in SWITCH.read_text():
        pytest.skip("this system gives nobody large pages")
    bare = mmap.mmap(-1, 2**26)
    bare.madvise(pages.HUGE)
    before = large_bytes()
    bare.write(bytes(2**26))
    if large_bytes() - before < 2**25:
        pytest.skip("this system has none left, or gives them to nobody")
    bare.close()
    before = large_bytes()
    copy = LargePages().hold(torch.ones(64 * 2**20, dtype=torch.uint8))
    assert large_bytes() - before > copy.nbytes / 2  # fewer where memory is in pieces


@pytest.mark.parametrize("form", ["fp32", "int8"])
def test_a_run_time_form_is_on_them(form):
    if not compiled.available():
        pytest.skip("the extra fast (llvmlite) is not installed")
    net = big().net.eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = net(ids)
        fast = make_fast(net, form)
        torch.testing.assert_close(fast(ids), expected, rtol=0.1, atol=0.1)
        assert torch.equal(net(ids), expected)
    for own, its in zip(net.stack.blocks, fast.stack.blocks, strict=True):
        weight = its.ffn.in_proj.weight
        assert any(0 <= weight.data_ptr() - pages._address(c) < len(c) for c in pages._chunks)
        assert (weight.data_ptr() == own.ffn.in_proj.weight.data_ptr()) == (form == "fp32")


def test_the_fp32_form_moves_weights_once_and_still_shares_them():
    net = big().net.eval()
    make_fast(net, "fp32")
    places = [parameter.data_ptr() for parameter in net.parameters()]
    fast = make_fast(net, "fp32")
    assert [parameter.data_ptr() for parameter in net.parameters()] == places
    assert net.head.proj.weight is net.embed.tokens.weight  # tied as before
    with torch.no_grad():
        net.stack.blocks[0].ffn.in_proj.weight.mul_(2)
        ids = torch.arange(9)[None]
        torch.testing.assert_close(fast(ids), net(ids), rtol=1e-4, atol=1e-4)


def test_what_is_mapped_from_a_file_stays_there(tmp_path):
    big().save(tmp_path / "model")
    model = ch.load(tmp_path / "model")
    files, weights = Files(), list(model.net.parameters())
    assert all(files.have(weight) for weight in weights)
    assert not files.have(torch.ones(100_000))
    places = [weight.data_ptr() for weight in weights]
    make_fast(model.net, "fp32")
    assert [weight.data_ptr() for weight in weights] == places


def test_what_is_part_of_something_larger_stays_there():
    net = big().net.eval()
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    first = 0
    for parameter in net.parameters():
        parameter.data = flat[first : first + parameter.numel()].view(parameter.shape)
        first += parameter.numel()
    make_fast(net, "fp32")
    ids = torch.arange(9)[None]
    with torch.no_grad():
        flat.zero_()
        assert bool((net(ids) == 0).all())


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_weights_stay_usable_whatever_was_made_in_inference_mode(built, made, turned):
    with torch.inference_mode(built):
        net = big().net.eval()
        if turned:
            for block in net.stack.blocks:
                weight = block.ffn.in_proj.weight
                weight.data = weight.data.t().contiguous().t()
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        expected = net(ids).clone()
    with torch.inference_mode(made):
        fast = make_fast(net, "fp32")
    assert any(p.is_inference() for p in net.parameters()) == built
    with torch.inference_mode():
        torch.testing.assert_close(fast(ids), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(net(ids), expected, rtol=1e-4, atol=1e-4)
    if not built:
        net.requires_grad_(True)
        net(ids).sum().backward()
        assert all(p.grad is not None for p in net.parameters())
