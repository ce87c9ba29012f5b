"""What attention heads do: spread over everything, stuck to one place, or nothing at all.

    entropy of a row = -sum p log p / log(number of keys it may see), from 0 (one key) to 1 (all)

dead       what the head writes is less than 1/10,000 of the stream it is added to
first      nearly all weight is on the first token: a place to rest (Xiao et al. 2023), does nothing
itself     nearly all weight is on the token's own place: what it reads it has already
previous   nearly all weight is on the token before: useful
one-hot    all weight is on one key, here and there: right for copying, but the softmax passes on no
           gradient any more
uniform    everything counts the same
mixed      all others
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.data.batch import Batch
from clearhead.models.base import Net
from clearhead.tap import capture, patch, taps
from clearhead.training.finding import Finding, Level, listed

MOST, SHARP, EVEN, NOTHING = 0.9, 0.98, 0.99, 1e-4
SEEN = 4  # rows that see fewer keys than this are left out: they cannot but be sharp
TOKENS = 1024  # so many are looked at


@dataclass(frozen=True)
class Head:
    """One head, over the rows of a batch."""

    layer: str
    """The path of its attention layer."""
    number: int
    """Which head of it."""
    does: str
    """In one word; see above."""
    entropy: float
    """0: one key; 1: all keys alike."""
    top: float
    """The largest weight, on average."""
    writes: float
    """Length of what it adds, as a part of that of the stream."""


def look_at_heads(net: Net, batch: Batch) -> list[Head]:
    """Every head of every layer; one layer at a time, because patterns are large."""
    batch = batch.part(0, max(1, batch.inputs[-1].numel() // TOKENS))
    paths = [name.rpartition(".")[0] for name in taps(net) if name.endswith("_attn.pattern")]
    heads: list[Head] = []
    with torch.inference_mode(), net.at_rest():
        for path in paths:
            heads += _heads(net, batch, path)
    return heads


def _heads(net: Net, batch: Batch, path: str) -> list[Head]:
    enter = f"{path.rpartition('.')[0]}.enter"
    with capture(net, f"{path}.pattern", f"{path}.z", enter) as acts:
        net(*batch.inputs, **batch.places)
    # Without queries every key that may be seen has some weight: so the mask is known.
    with patch(net, {f"{path}.q": torch.zeros_like}), capture(net, f"{path}.pattern") as blind:
        net(*batch.inputs, **batch.places)
    pattern = acts[f"{path}.pattern"].float()  # [b, h, q, k]
    open_ = blind[f"{path}.pattern"] > 0
    rows = open_.sum(-1) >= SEEN  # [b, h, q]
    if not bool(rows.any(dim=2).any(dim=0).all()):
        return []
    mean = _Mean(rows)
    own = path.endswith("self_attn") and pattern.shape[2] == pattern.shape[3]
    shares = {
        "first": mean(pattern.gather(3, open_.float().argmax(3, keepdim=True))[..., 0]),
        "itself": mean(pattern.diagonal(dim1=2, dim2=3)) if own else None,
        "previous": mean(_previous(pattern)) if own else None,
    }
    surprise = -(pattern * pattern.clamp(min=1e-30).log()).sum(-1)
    entropy = mean(surprise / open_.sum(-1).clamp(min=2).log())
    top = mean(pattern.amax(-1))
    attention: Any = net.get_submodule(path)
    weight = attention.out_proj.weight.float()
    z = acts[f"{path}.z"].float()
    written = torch.einsum("bhqd,mhd->bhqm", z, weight.unflatten(1, z.shape[1::2])).norm(dim=-1)
    stream = acts[enter].float().norm(dim=-1).unsqueeze(1).expand(rows.shape)
    writes = mean(written) / mean(stream).clamp(min=1e-30)
    heads = []
    for h in range(pattern.shape[1]):
        numbers = float(entropy[h]), float(top[h]), float(writes[h])
        places = {name: float(s[h]) for name, s in shares.items() if s is not None}
        heads.append(Head(path, h, _does(places, *numbers), *numbers))
    return heads


class _Mean:
    """The mean over the rows that count, for each head."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.count = rows, rows.sum(dim=(0, 2))

    def __call__(self, values: Tensor) -> Tensor:
        return (values * self.rows).sum(dim=(0, 2)) / self.count


def _previous(pattern: Tensor) -> Tensor:
    """The weight on the key before the query's own place; the first query has none."""
    before = pattern.diagonal(offset=-1, dim1=2, dim2=3)
    return torch.nn.functional.pad(before, (1, 0))


def _does(places: dict[str, float], entropy: float, top: float, writes: float) -> str:
    """The word for a head."""
    if writes < NOTHING:
        return "dead"
    for name, share in places.items():
        if share > MOST:
            return name
    if top > SHARP:
        return "one-hot"
    return "uniform" if entropy > EVEN else "mixed"


COLLAPSED = ("first", "itself", "one-hot")


def check_attention(net: Net, batch: Batch) -> list[Finding]:
    """Heads that are stuck, even or dead; a layer of nothing else is a warning."""
    heads = look_at_heads(net, batch)
    if not heads:
        return []
    details = {"heads": [asdict(head) for head in heads]}
    mean = sum(head.entropy for head in heads) / len(heads)
    found = [
        *_stuck(heads, [head for head in heads if head.does in COLLAPSED]),
        *_even(heads, [head for head in heads if head.does == "uniform"]),
        *_silent([head for head in heads if head.does == "dead"]),
    ]
    worst = [finding for finding in found if finding.worrying]
    text = f"{len(heads)} heads have a mean entropy of {mean:.2f} (0: one key, 1: all alike)."
    if not worst:
        found.append(Finding("attention", "good", text, mean, "", details))
    return found


def _stuck(heads: list[Head], stuck: list[Head]) -> list[Finding]:
    if not stuck:
        return []
    kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(h.does for h in stuck).items())
    text = f"{len(stuck)} of {len(heads)} heads have collapsed ({kinds}): {_names(stuck)}."
    level: Level = "warning" if _whole_layer(heads, stuck) else "note"
    mend = (
        "Collapsed attention learns no more: lower optim.lr, raise optim.warmup, or use q/k norm "
        "(variant.qk_norm=true)."
        if level == "warning"
        else "A few such heads are common; fewer heads may do as well."
    )
    return [Finding("attention", level, text, len(stuck) / len(heads), mend)]


def _even(heads: list[Head], even: list[Head]) -> list[Finding]:
    if not even:
        return []
    text = f"{len(even)} of {len(heads)} heads look at everything alike: {_names(even)}."
    level: Level = "warning" if len(even) == len(heads) else "note"
    mend = (
        "Attention has learnt nothing yet: train longer, or raise optim.lr."
        if level == "warning"
        else "They have not learnt what to look for, or average on purpose; fewer heads may do."
    )
    return [Finding("attention", level, text, len(even) / len(heads), mend)]


def _silent(dead: list[Head]) -> list[Finding]:
    if not dead:
        return []
    text = f"{len(dead)} heads write nothing into the stream: {_names(dead)}."
    mend = "They are dead weight: fewer heads, less weight decay, or a smaller learning rate."
    return [Finding("attention", "warning", text, float(len(dead)), mend)]


def _whole_layer(heads: list[Head], chosen: list[Head]) -> bool:
    """Whether a layer of more than one head has none but these."""
    every, some = Counter(head.layer for head in heads), Counter(head.layer for head in chosen)
    return any(count == every[layer] and count > 1 for layer, count in some.items())


def _names(heads: list[Head]) -> str:
    layers: dict[str, list[str]] = {}
    for head in heads:
        layers.setdefault(head.layer.replace("stack.", ""), []).append(str(head.number))
    return listed([f"{layer} {'+'.join(numbers)}" for layer, numbers in layers.items()])
