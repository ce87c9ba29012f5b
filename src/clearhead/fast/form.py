"""The run-time form of a network: the same modules, with packed linear layers in place of its own.

It shares with the original what it can: all of its taps, and every tensor that is not packed, so
the fp32 form costs no memory and follows what the original learns. Everything that a network can do
(`encode`, `decode`, `new_cache`, `states`, `at_rest`) it does as before, whatever its family.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.attention.attention import Attention
from clearhead.attention.softmax import Softmax
from clearhead.errors import ClearheadError, did_you_mean, require
from clearhead.fast import compile as compiled
from clearhead.fast.between import FastSoftmax, fast_activation, joint
from clearhead.fast.blocks import GPU, compile_blocks
from clearhead.fast.formats import FORMS, GROUP, Form, pack, stored_as
from clearhead.fast.likeliest import likeliest
from clearhead.fast.linear import FastEmbedding, FastLinear
from clearhead.fast.pages import Files, LargePages
from clearhead.fast.program import program
from clearhead.fast.reading import reader
from clearhead.fast.rounding import round_to_int4, second_moments
from clearhead.layers.ffn import FFN, GatedFFN
from clearhead.layers.stack import Stack
from clearhead.memory import keep_freed_memory
from clearhead.models.base import Decoder, EncoderDecoder, Net
from clearhead.models.heads import LMHead
from clearhead.tap import hooked, taps

# Weights in linear layers from which on the fp32 form is taken unasked: of a model that reads (a
# smaller one is read from the cache anyway), and of one that writes, whose steps become one call.
WORTH, WRITING = 10_000_000, 100_000
PACKED = ("weight", "scales")
_Layer = tuple[str, Form, tuple[Tensor, Tensor]]  # name, form, weight and scales


@torch.no_grad()
def make_fast(net: Net, form: Form, text: Tensor | None = None) -> Net:
    """A network that runs on this form of the weights.

    On a GPU the weights stay as they are and its blocks are compiled (`blocks`); on other devices
    it is the network itself. Without llvmlite the packed forms run by unpacking, which saves memory
    and no time. `text`, ids that a decoder may see, makes int4 better (`rounding`).
    """
    check_form(net, form)
    devices = {parameter.device.type for parameter in net.parameters()}
    if devices == {GPU}:
        return compile_blocks(_sharing_copy(net)).eval()
    if devices - {"cpu"}:
        return net
    pages = LargePages()
    if form == "fp32":
        _lay_out(net, pages)
    new = _sharing_copy(net)
    tables = _tied_tables(new) if form != "fp32" else {}
    layers = dict(_linears(new))
    packed = _rounded(net, layers, text) if form == "int4" and text is not None else iter(())
    packed = itertools.chain(packed, _packed(layers, form))
    for name, own, (weight, scales) in packed:
        linear = layers.pop(name)
        weight = weight if own == "fp32" else pages.hold(weight)
        fast = FastLinear(own, linear.in_features, weight, scales, linear.bias)
        new.set_submodule(name, fast)
        for table in tables.get(f"{name}.weight", ()):
            new.set_submodule(table, FastEmbedding(fast))
    _drop_ties(new)
    _quicken(new)
    refresh(new)
    return new.eval()


def _lay_out(net: Net, pages: LargePages) -> None:
    """Weights as the products read them: in rows (those of Hugging Face's GPT-2 came the other way
    round), and on large pages, unless they are mapped from a file or parts of something larger. The
    network keeps them so, and both forms share them.
    """
    files = Files()
    for module in net.modules():
        if type(module) is not nn.Linear:
            continue
        own = module.weight
        with torch.inference_mode(own.is_inference()):  # it stays of the kind that it is
            weight = own.data.contiguous()
            alone = weight.untyped_storage().nbytes() == weight.nbytes  # or others see it, too
            if alone and not own.is_inference() and not files.have(weight):
                weight = pages.hold(weight)
            if weight.data_ptr() != own.data_ptr():
                own.data = weight


def _packed(layers: dict[str, Any], form: Form) -> Iterator[_Layer]:
    """Every layer in its form."""
    for name, linear in list(layers.items()):
        own, weight = _own_form(name, form), linear.weight
        none = weight.new_empty(len(weight), 0)
        yield name, own, (weight, none) if own == "fp32" else pack(weight, own)


def _rounded(net: Net, layers: dict[str, Any], text: Tensor) -> Iterator[_Layer]:
    """The layers of int4, rounded for this text."""
    ours = dict(_linears(net))
    chosen = [
        (name, ours[name])
        for name in layers
        if _own_form(name, "int4") == "int4" and ours[name].in_features % GROUP == 0
    ]
    for name, moments in second_moments(net, chosen, text):
        if moments.any():  # not of a layer that this text does not come to
            yield name, "int4", round_to_int4(ours[name].weight, moments)


def form_of(net: nn.Module) -> Form | None:
    """The form of a network's linear layers; None: they are torch's own."""
    found = [module.form for module in net.modules() if isinstance(module, FastLinear)]
    return max(found, key=FORMS.index) if found else None


def worth_it(net: Net) -> bool:
    """Whether the fp32 form of this network would be quicker: it is on a CPU, in fp32, not too
    small, not yet fast, and nobody listens by torch's own hooks, which belong to the modules they
    are on.
    """
    if not compiled.available() or not _on_cpu(net):
        return False
    count = 0
    for module in net.modules():
        if isinstance(module, FastLinear) or hooked(module):
            return False
        count += module.weight.numel() if type(module) is nn.Linear else 0
    writes = isinstance(net, (Decoder, EncoderDecoder))
    return count >= (WRITING if writes else WORTH)


def _steps_at_once(net: Net) -> bool:
    """Whether a decoding step of this network is one call."""
    return any(isinstance(part, Stack) and part.step is not None for part in net.modules())


class Quick:
    """Gives the fp32 form of a network where that is quicker, else the network itself. It is made
    once, and again when the network's tensors are others.
    """

    def __init__(self) -> None:
        self._made: tuple[Net, tuple[object, ...], Net] | None = None

    def __reduce__(self) -> tuple[type[Quick], tuple[()]]:
        return Quick, ()  # a copy makes forms of its own

    def __call__(self, net: Net) -> Net:
        if _on_cpu(net):
            keep_freed_memory()  # a batch of texts was a quarter quicker
        if not worth_it(net):
            return net
        now = _mark(net)
        if self._made is None or self._made[0] is not net or self._made[1] != now:
            fast = make_fast(net, "fp32")
            small = count_weights(net) < WORTH
            fast = net if small and not _steps_at_once(fast) else fast
            self._made = net, _mark(net), fast  # weights may have been laid in rows
            if fast is not net:
                compiled.tell("it runs in the fp32 form, with products compiled for this processor")
        return self._made[2]


def _mark(net: nn.Module) -> tuple[object, ...]:
    """What a copy of a network would not follow: which modules and tensors it has, and their plain
    settings.
    """
    tensors = (*net.parameters(), *net.buffers())
    settings = [
        (id(module), name, value)
        for module in net.modules()
        for name, value in vars(module).items()
        if type(value) in (int, float, bool, str) and name != "training"
    ]
    return (*(tensor.data_ptr() for tensor in tensors), *settings)


def count_weights(net: nn.Module) -> int:
    """How many numbers a network has, packed ones too."""
    packed = [m for m in net.modules() if isinstance(m, FastLinear) and m.form != "fp32"]
    plain = sum(parameter.numel() for parameter in net.parameters())
    return plain + sum(module.in_features * module.out_features for module in packed)


def held_bytes(net: nn.Module) -> int:
    """What the weights of a network take, packed or not."""
    return sum(tensor.nbytes for tensor in (*net.parameters(), *packed_tensors(net).values()))


def step_bytes(net: nn.Module) -> int:
    """What of them a greedy step reads, as the network now is: all, or of the head its codes."""
    head = getattr(net, "head", None)
    finder = head.likeliest if isinstance(head, LMHead) else None
    return held_bytes(net) - (0 if finder is None else finder.left_out)


def packed_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Name -> what is to be saved beside the parameters."""
    return {
        f"{name}.{part}": getattr(module, part)
        for name, module in net.named_modules()
        if isinstance(module, FastLinear) and module.form != "fp32"
        for part in PACKED
        if getattr(module, part) is not None
    }


def take_packed(
    net: Net, form: object, tensors: dict[str, Tensor], where: str
) -> dict[str, Tensor]:
    """Give a network its packed layers from the tensors of a file; returns the tensors that are
    left, for its parameters.
    """
    require(
        form in FORMS[1:],
        f"{where} has weights in the form {form!r:.40}, which this version does not know; it knows "
        f"{', '.join(FORMS[1:])}.",
    )
    left, tables = dict(tensors), _tied_tables(net)
    for name, linear in _linears(net):
        own = _own_form(name, form)  # type: ignore[arg-type]
        n, k = linear.out_features, linear.in_features
        found = {
            part: _taken(left, f"{name}.{part}", *wanted, where)
            for part, wanted in stored_as(own, n, k).items()
        }
        scales = found.get("scales", torch.empty(n, 0))
        fast = FastLinear(own, k, found["weight"], scales, linear.bias)
        net.set_submodule(name, fast)
        for table in tables.get(f"{name}.weight", ()):
            net.set_submodule(table, FastEmbedding(fast))
    _drop_ties(net)
    _quicken(net)
    net.requires_grad_(False)
    return left


def refresh(net: nn.Module) -> None:
    """Let all packed layers look again where their tensors are. What is beside packed weights is
    fp32, as their products are.
    """
    if form_of(net) not in (None, "fp32"):
        for parameter in net.parameters():
            parameter.data = parameter.data.float()
    for module in net.modules():
        if isinstance(module, FastLinear):
            module.refresh()


# --- parts ---


def check_form(net: Net, form: str) -> None:
    """Refuse what cannot be packed."""
    require(
        form in FORMS,
        f'There is no form "{form}".{did_you_mean(str(form), FORMS)} Known: {", ".join(FORMS)}.',
    )
    require(
        not any(parameter.is_meta for parameter in net.parameters()),
        'A model on the meta device has no weights to pack: build it without device="meta".',
    )
    had = form_of(net)
    if had not in (None, "fp32", form):
        raise ClearheadError(
            f"This model's weights are {had} already, and what was rounded away does not come "
            "back: start from the model that they were made from."
        )
    for name, linear in _linears(net) if form != "fp32" else ():
        require(
            bool(linear.weight.isfinite().all()),
            f"The weights of {name} are not all numbers: the model is damaged.",
        )


def _own_form(name: str, form: Form) -> Form:
    """The form of one layer: the head keeps more bits than the rest."""
    if form == "int4" and name.split(".")[0] == "head":
        return "int8"
    return form


def _sharing_copy(net: Net) -> Net:
    """The same modules anew, around the same tensors and the same taps."""
    shared: dict[int, object] = {id(tap): tap for tap in taps(net).values()}
    for parameter in net.parameters():
        shared[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    shared |= {id(buffer): buffer for buffer in net.buffers()}
    return copy.deepcopy(net, shared)


def _linears(net: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that can be packed; an fp32 form has them as they were."""
    for name, module in list(net.named_modules()):
        if type(module) is nn.Linear or (isinstance(module, FastLinear) and module.form == "fp32"):
            yield name, module


def _quicken(net: Net) -> None:
    """Give attention and feed-forward layers their compiled parts."""
    if not compiled.available():
        return
    for module in net.modules():
        if isinstance(module, Attention):
            module.joint = joint(module.q_proj, module.k_proj, module.v_proj)
            if type(module.kernel) is Softmax:
                module.kernel = FastSoftmax(module.kernel)
        elif isinstance(module, GatedFFN):
            module.joint = joint(module.gate_proj, module.in_proj)
        elif isinstance(module, LMHead):
            module.likeliest = likeliest(module.proj)
        if isinstance(module, (FFN, GatedFFN)):
            module.activation = fast_activation(module.activation)
    for module in net.modules():
        if isinstance(module, Stack):
            module.step, module.read = program(module), reader(module)


def _drop_ties(net: Net) -> None:
    """Forget the ties of tables that are looked up in a packed head."""
    left = dict(net.named_parameters(remove_duplicate=False))
    net.ties = tuple(pair for pair in net.ties if all(name in left for name in pair))


def _tied_tables(net: Net) -> dict[str, list[str]]:
    """Weight of a linear layer -> the token tables that are the same matrix."""
    slots = dict(net.named_parameters(remove_duplicate=False))
    linears = [f"{name}.weight" for name, _ in _linears(net)]
    tables = [name for name, part in net.named_modules() if type(part) is nn.Embedding]
    return {
        name: [table for table in tables if slots[f"{table}.weight"] is slots[name]]
        for name in linears
    }


def _taken(
    tensors: dict[str, Tensor], name: str, kind: torch.dtype, shape: tuple[int, ...], where: str
) -> Tensor:
    """A tensor out of a file's, if it is there and as it must be."""
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise ClearheadError(f"{where}: the packed weights of {name} are missing.")
    require(
        tensor.dtype == kind and tuple(tensor.shape) == tuple(shape),
        f"{where}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, and must be {kind} of "
        f"shape {tuple(shape)}.",
    )
    return tensor


def _on_cpu(net: nn.Module) -> bool:
    first = next(net.parameters(), None)
    return first is not None and first.device.type == "cpu" and first.dtype == torch.float32
