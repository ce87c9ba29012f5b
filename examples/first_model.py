"""A first model, from nothing: build a small decoder, teach it some English, look inside.

    python examples/first_model.py            half a minute on two cores, if they are free

The text is Python's own manual, which is installed wherever Python is. The loop is plain PyTorch on
purpose: this is all that training is. The attention pattern at the end is the one the model really
used.
"""

import argparse
import pydoc_data.topics
import sys
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track

import clearhead as ch

CONTEXT, BATCH = 64, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="how many batches to learn from")
    steps = parser.parse_args().steps
    console = Console()
    torch.manual_seed(0)

    text = "\n".join(pydoc_data.topics.topics.values())
    characters = sorted(set(text))
    ids = torch.tensor([characters.index(c) for c in text[:300_000]])

    model = ch.build(
        "llama",
        seed=0,
        vocab_size=len(characters),
        d_model=128,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        max_len=256,
    )
    console.print(f"\n{model}: {len(characters)} characters, {len(ids):,} of them to learn from")

    learn(model.net, ids, steps, console)
    say(model.net, characters, "The value of ", console)
    look(model, characters, "the list of the list", console)


def learn(net: torch.nn.Module, ids: torch.Tensor, steps: int, console: Console) -> None:
    """Next-character prediction: the target is the input, one step to the left."""
    schedule = torch.linspace(3e-3, 3e-4, steps)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    start, first = time.perf_counter(), 0.0
    for step in track(range(steps), description="learning", console=console):
        at = torch.randint(len(ids) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([ids[i : i + CONTEXT + 1] for i in at])
        logits = net(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.param_groups[0]["lr"] = float(schedule[step])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        first = first or loss.item()
    seconds = time.perf_counter() - start
    rate = steps * BATCH * CONTEXT / seconds
    console.print(
        f"loss {first:.2f} -> {loss.item():.2f} in {seconds:.0f} s ({rate:,.0f} characters/s)"
    )


@torch.inference_mode()
def say(net: torch.nn.Module, characters: list[str], prompt: str, console: Console) -> None:
    """One character after the other, with a cache, so that each step costs one token."""
    net.eval()
    dice = torch.Generator().manual_seed(1)
    cache = net.new_cache(rows=1, max_len=256)
    new = torch.tensor([[characters.index(c) for c in prompt]])
    out = prompt
    for _ in range(200):
        logits = net.decode(new, cache=cache)[0, -1]
        new = torch.multinomial((logits / 0.7).softmax(0), 1, generator=dice).view(1, 1)
        out += characters[new.item()]
    console.rule("it says")
    console.print(out, markup=False, highlight=False)


@torch.inference_mode()
def look(model: ch.Model, characters: list[str], text: str, console: Console) -> None:
    """Which character each character looks at most, in the sharpest head of every layer."""
    ids = torch.tensor([[characters.index(c) for c in text]])
    with ch.capture(model.net, "blocks.*.self_attn.pattern") as acts:
        model(ids)
    console.rule("where its heads look")
    for name, pattern in acts.items():
        head = int(pattern[0].amax(-1).mean(-1).argmax())
        console.print(f"{name}, head {head}: each row is a character, darker means more weight")
        for row, weights in enumerate(pattern[0, head]):
            shades = "".join(" .:-=+*#%@"[min(int(w * 10), 9)] for w in weights[: row + 1])
            console.print(f"  {text[row]!r:>4} {shades}", markup=False, highlight=False)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
