"""The form for GPUs, here with a compiler that leaves the arithmetic as it is, in a process of its
own: what checks shapes in the tests cannot be compiled.
"""

import os
import subprocess
import sys
import textwrap

import clearhead as ch
from clearhead.fast import form

TINY = {"n_layers": 3, "d_model": 32, "n_heads": 2, "vocab_size": 50, "max_len": 48}

HEAD = f"""
import torch, clearhead as ch
from clearhead.attention.positions import Positions
from clearhead.fast.blocks import compile_blocks
from clearhead.fast.form import _sharing_copy
from clearhead.tap import capture

torch.set_num_threads(1)
graphs = []

def counting(graph, inputs):
    graphs.append(graph)
    return graph.forward

def pair(family):
    torch._dynamo.reset()
    graphs.clear()
    net = ch.build(family, seed=0, **{TINY}).net.eval()
    return net, compile_blocks(_sharing_copy(net), counting)

def texts(net, source=None, at=None):
    with torch.inference_mode():
        cache = net.new_cache(2, 40) if source is None else net.new_cache(net.encode(source), 40)
        found = [net.decode(torch.arange(10).view(2, 5), at=at, cache=cache)[:, -1]]
        cache.reorder(torch.tensor([1, 0]))
        for _ in range(20):
            found.append(net.decode(found[-1].argmax(-1, keepdim=True), cache=cache)[:, -1])
    return torch.stack(found)
"""


def run(program):
    """It must print what it has shown, and nothing else."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    code = HEAD + textwrap.dedent(program)
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_texts_and_taps_are_those_of_the_plain_network_and_blocks_share_their_code():
    found = run("""
    for family in ("gpt2", "llama"):
        net, compiled = pair(family)
        assert texts(compiled).equal(texts(net))
        print(len(graphs))  # one for many tokens, one for a step, whatever its length
    net, compiled = pair("bart")
    source = torch.arange(14).view(2, 7)
    assert texts(compiled, source).equal(texts(net, source))
    print(0 < len(graphs) <= 5)
    net, compiled = pair("gpt_neox")  # its blocks are parallel
    ragged = Positions.ragged([5, 3])
    assert texts(compiled, at=ragged).equal(texts(net, at=ragged))
    print(len(graphs) > 0)
    net, compiled = pair("gpt2")
    ids, name = torch.arange(6).view(1, 6), "stack.blocks.1.self_attn.pattern"
    with torch.no_grad():
        compiled(ids)  # while nobody listens
        with capture(net, name) as plain:
            net(ids)
        with capture(compiled, name) as heard:
            compiled(ids)
    print(heard[name].equal(plain[name]) and len(graphs) > 1)
    """)
    assert found == ["2", "2", "True", "True", "True"]


def test_a_network_on_a_gpu_gets_it(monkeypatch):
    """There is none here: the CPU stands for it."""
    model = ch.build("gpt2", seed=0, **TINY)
    seen = []
    monkeypatch.setattr(form, "GPU", "cpu")
    monkeypatch.setattr(form, "compile_blocks", lambda net: seen.append(net) or net)
    fast = model.fast("fp32")
    assert seen == [fast.net]
    assert fast.net is not model.net
    shared = dict(model.net.named_parameters())
    assert all(shared[n].data_ptr() == p.data_ptr() for n, p in fast.net.named_parameters())
