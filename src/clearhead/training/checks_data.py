"""What a network is shown and asked: leaks, labels, padding, context, tokens.

A leak makes a model look good until it has to write by itself: what it may not see must not change
what it says, not even in the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.data.batch import IGNORED, Batch
from clearhead.data.batches import Buckets, Endless, too_long
from clearhead.models.base import Net
from clearhead.training.finding import Finding, Level
from clearhead.training.job import Job

ALPHABET = 256 + 100  # bytes and T5's sentinels are in a vocabulary whether they occur or not


@torch.inference_mode()
def check_leaks(net: Net, batch: Batch) -> list[Finding]:
    """Change one token: what a network that writes from left to right says before it must stay."""
    ids = batch.inputs[-1]
    width = ids.shape[1]
    if width < 2:
        return []
    other = _another(ids)
    with net.at_rest():
        usual = net(*batch.inputs, **batch.places)
        worst, heard = (0.0, 0), 0.0
        for t in sorted({1, width // 2, width - 1}):
            changed = ids.clone()
            changed[:, t] = other[:, t]
            said = net(*batch.inputs[:-1], changed, **batch.places)
            worst = max(worst, (_difference(usual[:, :t], said[:, :t]), t))
            heard = max(heard, _difference(usual[:, t:], said[:, t:]))
    leak, t = worst
    if leak > 0:
        text = f"The future leaks into the past: changing token {t} changes what is said before it "
        text += f"(by up to {leak:.2g})."
        mend = "The mask is wrong: attention, or something beside it, sees later positions."
        return [Finding("leaks", "bad", text, leak, mend)]
    if heard == 0:
        text = "Changing a token changes nothing at all: the network does not look at its input."
        return [Finding("leaks", "bad", text, 0.0, "Look at the numbers and the attention heads.")]
    return [Finding("leaks", "good", "Changing a token changes nothing before it.", 0.0)]


@torch.inference_mode()
def check_padding(net: Net, batches: Iterable[Batch]) -> list[Finding]:
    """Change what stands in empty slots: nothing that counts may change."""
    batch = next((batch for batch in batches if _empty(batch)), None)
    if batch is None:
        return []
    inputs = list(batch.inputs)
    for side, empty in _empty(batch).items():
        inputs[side] = torch.where(empty, _another(inputs[side]), inputs[side])
    with net.at_rest():
        usual, said = net(*batch.inputs, **batch.places), net(*inputs, **batch.places)
    padded = _empty(batch).get(len(inputs) - 1)
    if padded is not None and usual.dim() >= 3:
        usual, said = usual[~padded], said[~padded]
    leak = _difference(usual, said)
    if leak > 0:
        text = f"What stands in empty slots matters: it changes the output by up to {leak:.2g}."
        mend = "Padding must be hidden from attention and from pooling: give its slots position -1."
        return [Finding("padding", "bad", text, leak, mend)]
    return [Finding("padding", "good", "What stands in empty slots changes nothing.", 0.0)]


def _empty(batch: Batch) -> dict[int, Tensor]:
    """Which slots are empty, for each input that has such."""
    names = {"at": 0, "source_at": 0, "target_at": 1}
    found = {}
    for name, side in names.items():
        at = batch.places.get(name)
        if at is not None and at.holes:
            found[side] = (at.pos < 0).expand(batch.inputs[side].shape)
    return {side: empty for side, empty in found.items() if bool(empty.any())}


def _another(ids: Tensor) -> Tensor:
    """For every token another one that is sure to exist."""
    low, high = ids.min(), ids.max()
    if bool(low == high):  # a single token everywhere
        high = low + 1 if bool(low == 0) else low - 1
    return torch.where(ids == low, high, low)


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest; equal infinities are equal, and nothing has none."""
    unequal = one != other
    if not bool(unequal.any()):
        return 0.0
    return float((one - other).abs()[unequal].nan_to_num(nan=math.inf).max())


def check_labels(batches: Sequence[Batch], causal: bool) -> list[Finding]:
    """Is each token asked for where the token before it is shown, and nowhere given away?"""
    return _shifted(batches) if causal else _hidden(batches)


def _shifted(batches: Sequence[Batch]) -> list[Finding]:
    shares = {shift: _share(batches, shift) for shift in range(-1, 4)}
    right, same = shares[1], shares[0]
    if right > 0.999:
        text = "Every target is the next input token."
        return [Finding("labels", "good", text, right)]
    best = max(shares, key=lambda shift: shares[shift])
    if same > 0.9:
        text = f"The labels are not shifted: {same:.0%} of the targets are the very token shown."
    elif shares[best] > 0.9:
        text = f"The labels are shifted by {best} and not by 1 ({shares[best]:.0%} fit)."
    else:
        text = f"Only {right:.0%} of the targets are the next input token."
    mend = "Show tokens 0 to n-1 and ask for 1 to n: targets[:, :-1] must equal inputs[:, 1:]."
    return [Finding("labels", "bad", text, right, mend)]


def _share(batches: Sequence[Batch], shift: int) -> float:
    """How many of the targets at t are the input at t + shift."""
    fits = asked = 0
    for batch in batches:
        inputs, targets = batch.inputs[-1], batch.targets
        if inputs.shape != targets.shape or targets.shape[1] <= abs(shift):
            continue
        width = targets.shape[1] - abs(shift)
        first, second = max(0, -shift), max(0, shift)
        # What is asked further on is shown there as well: so empty slots are left out.
        there = targets[:, second : second + width] != IGNORED
        wanted, shown = targets[:, first : first + width], inputs[:, second : second + width]
        counted = there & (wanted != IGNORED)
        fits += int(((wanted == shown) & counted).sum())
        asked += int(counted.sum())
    return fits / asked if asked else float(shift == 1)


def _hidden(batches: Sequence[Batch]) -> list[Finding]:
    """Masked tokens: a tenth is shown as it is, by design; more gives the answer away."""
    shown = asked = 0
    for batch in batches:
        if batch.inputs[-1].shape == batch.targets.shape:
            counted = batch.targets != IGNORED
            shown += int(((batch.inputs[-1] == batch.targets) & counted).sum())
            asked += int(counted.sum())
    if not asked:
        return []
    share = shown / asked
    text = f"{share:.0%} of the tokens asked for are shown as they are (10 % is usual)."
    if share <= 0.5:
        return [Finding("labels", "good", text, share)]
    mend = "The answer is given away: raise data.objective.mask."
    return [Finding("labels", "bad", text, share, mend)]


def check_waste(batches: Sequence[Batch], by_tokens: bool = False) -> list[Finding]:
    """How many slots hold nothing."""
    slots, tokens = sum(b.slots for b in batches), sum(b.tokens for b in batches)
    if not slots:
        return []
    waste = 1 - tokens / slots
    text = f"{waste:.0%} of the slots of {len(batches)} batches are padding."
    if waste <= 0.2:
        return [Finding("waste", "good", text, waste)]
    mend = (
        "Examples of a batch are too unlike: a larger train.batch groups them better, or cut the "
        "longest (data.length)."
        if by_tokens
        else "Set data.by=tokens (train.batch counts tokens then), so that examples of similar "
        "length go together."
    )
    return [Finding("waste", "warning" if waste > 0.4 else "note", text, waste, mend)]


@torch.inference_mode()
def check_context(net: Net, batches: Iterable[Batch], length: int) -> list[Finding]:
    """Does the loss still fall at the end of the window?"""
    quarter = length // 4
    if quarter < 2:
        return []
    rows = []
    with net.at_rest():
        for batch in batches:
            if batch.targets.shape[1] == length:
                output = net(*batch.inputs, **batch.places)
                losses = F.cross_entropy(output.transpose(1, 2), batch.targets, reduction="none")
                rows.append(losses[:, -4 * quarter :].unflatten(1, (4, quarter)).mean(2).double())
    quarters = torch.cat(rows) if rows else torch.zeros(0, 4)  # [windows, 4]
    if len(quarters) < 8:
        return []
    mean = quarters.mean(0).tolist()
    gains = quarters[:, 2] - quarters[:, 3]
    gain, error = float(gains.mean()), float(gains.std()) / math.sqrt(len(gains))
    relative = gain / max(mean[2], 1e-9)
    shown = " ".join(f"{value:.3g}" for value in mean)
    text = f"Loss in the four quarters of the window: {shown}."
    details = {"quarters": mean, "error": error}
    if gain > 3 * error and relative > 0.01:
        text += f" It still falls at the end, by {relative:.1%}."
        mend = "A longer context may help: data.length and the model's max_len."
        return [Finding("context", "note", text, relative, mend, details)]
    return [Finding("context", "good", text, relative, "", details)]


def check_left_out(job: Job) -> list[Finding]:
    """Examples that are longer than the model's context are not learnt from."""
    if job.objective.stream or isinstance(job.batches, Endless):
        return []
    train = job.batches.left_out if isinstance(job.batches, Buckets) else 0
    valid = too_long(job.valid, job.objective, job.length)
    if not train and not valid:
        return [Finding("context", "good", f"Every example fits into {job.length} tokens.", 0.0)]
    share = valid / max(1, len(job.valid))
    text = f"{train:,} training examples and {share:.1%} of the validation data are longer than "
    text += f"{job.length} tokens and left out."
    mend = "Raise data.length and the model's max_len, or cut the examples."
    level: Level = "warning" if share > 0.02 else "note"
    return [Finding("context", level, text, share, mend)]


def check_tokens(job: Job, batches: Sequence[Batch]) -> list[Finding]:
    """Unknown tokens in the validation data, and tokens that nothing ever uses."""
    sides = {"ids": 0, "source": 0, "first": 0, "second": 0, "target": 1}
    tokenizer = job.model.tokenizer
    assert tokenizer is not None
    found = []
    for name in [column for column in sides if column in job.valid.columns]:
        own = tokenizer.target if name == "target" else tokenizer
        found += check_unknown(np.asarray(job.valid.flat(name)), own.unk_id, name)
    if tokenizer.target is tokenizer and not job.recipe.model.source:
        ids = [tensor.numpy().ravel() for batch in batches for tensor in batch.inputs]
        found += check_unused(np.concatenate(ids), tokenizer.vocab_size)
    return found


def check_unknown(ids: np.ndarray, unknown: int | None, name: str = "ids") -> list[Finding]:
    """The part of some tokens that stands for what the tokeniser does not know."""
    where = "the validation data" if name == "ids" else f"the validation data ({name})"
    share = float((ids == unknown).mean()) if unknown is not None and len(ids) else 0.0
    text = f"{share:.2%} of the tokens of {where} are unknown."
    if share <= 0.0005:
        return [Finding("tokens", "good", text, share)]
    mend = "Use a tokeniser that knows everything (bytes, bpe), a larger vocab_size, or more text."
    return [Finding("tokens", "warning" if share > 0.01 else "note", text, share, mend)]


def check_unused(ids: np.ndarray, size: int) -> list[Finding]:
    """The part of a vocabulary that does not occur; with few tokens that says nothing."""
    if len(ids) < 20 * size:
        return []
    unused = size - len(np.unique(ids))
    share = unused / size
    text = f"{share:.0%} of the {size:,} tokens of the vocabulary do not occur in {len(ids):,}."
    if share <= 0.3 or unused <= ALPHABET:
        return [Finding("tokens", "good", text, share)]
    mend = "A smaller tokenizer.vocab_size saves parameters and makes the rest learn faster."
    return [Finding("tokens", "note", text, share, mend)]
