"""The three shapes of a Transformer: encoder, decoder, encoder-decoder.

    Encoder          ids -> states (or its head's output)            encode
    Decoder          ids -> logits                                   decode, new_cache
    EncoderDecoder   source, target -> logits                        encode, decode, new_cache

Generation, training and the lens depend on these calls alone. A forward without positions takes ids
without padding; for ragged batches hand in `Positions.ragged(lengths)`. One step of generation is
`decode` with one token and a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules import module as every

from clearhead.attention.bias import ALiBi
from clearhead.attention.cache import Cache
from clearhead.attention.positions import Positions
from clearhead.attention.rotary import Rotary
from clearhead.errors import ClearheadError, require
from clearhead.layers.embed import Embedding
from clearhead.layers.recurrent import RecurrentStack
from clearhead.layers.stack import Memory, Stack
from clearhead.models.heads import LMHead
from clearhead.tap import hooked

Ids = Int[Tensor, "b t"]
Next = tuple[Float[Tensor, "b v"], Int[Tensor, " v"] | None]
Ties = tuple[tuple[str, str], ...]


class Net(nn.Module):
    """A network that knows which of its parameters are one and the same."""

    def __init__(self, ties: Ties = ()) -> None:
        super().__init__()
        self.ties = ties  # (the alias, the parameter it shares)

    def tie(self) -> None:
        """Make every alias the parameter it stands for. Loading and moving from the meta device
        undo it.
        """
        for alias, original in self.ties:
            path, _, name = alias.rpartition(".")
            setattr(self.get_submodule(path), name, self.get_parameter(original))

    def retie(self) -> None:
        """Make aliases one again with what they stand for, where only their memory is another
        (`load_state_dict(..., assign=True)` does that); refuse numbers that differ, of which a file
        would keep one.
        """
        slots = dict(self.named_parameters(remove_duplicate=False))  # (packed ones are not there)
        apart = False
        for alias, original in self.ties:
            one, other = slots.get(alias), slots.get(original)
            if one is None or other is None or one is other:
                continue
            apart = True
            require(
                torch.equal(one, other),
                f"By this model's settings {alias} is {original}, of which a folder keeps one, and "
                "now they differ. net.tie() makes both the latter; to have two matrices, build the "
                'model with "tied": False in its head, and copy the weights.',
            )
        if apart:
            self.tie()

    def reset_tables(self) -> None:
        """Compute the fixed tables (angles, slopes) again, after `to_empty` left them unset."""
        for module in self.modules():
            if isinstance(module, (Rotary, ALiBi)):
                module.reset()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Dropout off within the block, then as it was."""
        training = self.training
        if training:  # walking over all modules would cost a decoding step more than it saves
            self.eval()
        try:
            yield
        finally:
            if training:
                self.train()

    def new_cache(self, *_: Any, **__: Any) -> Cache:
        """Decoders make a cache; others say why they have none."""
        raise ClearheadError(
            f"{type(self).__name__} reads its input at once and decodes nothing, so it has no "
            "cache: a decoder or an encoder-decoder has one."
        )

    def decode_last(
        self, ids: Ids, at: Positions, cache: Cache, last: Int[Tensor, " b"]
    ) -> Float[Tensor, "b v"]:
        """`decode` where only the logits at slot last[i] of row i are asked for."""
        rows = torch.arange(len(ids), device=ids.device)
        return self.decode(ids, at=at, cache=cache)[rows, last]  # type: ignore[operator]

    def decode_next(self, ids: Int[Tensor, "b 1"], cache: Cache, greedy: bool = False) -> Next:
        """Logits of what follows one more token of each row, and of which tokens these are: None,
        of all, in their order. If `greedy`, only the best token of a row is asked for.
        """
        return self.decode(ids, cache=cache)[:, -1], None  # type: ignore[operator]

    def new_place(self, place: dict[str, Any]) -> dict[str, Any]:
        """Device and dtype of the parameters, unless `place` says otherwise."""
        first = next(self.parameters())
        return {"device": first.device, "dtype": first.dtype} | place


def _finds_best(net: Net, own: type[Net]) -> bool:
    """Whether a head knows a shorter way to the best token than all logits, and nobody has another
    one or looks on.
    """
    head: Any = net.head
    return (
        type(head) is LMHead
        and head.likeliest is not None
        and head.likeliest.linear is head.proj
        and type(net).decode is own.decode  # type: ignore[attr-defined]
        and not (hooked(head) or every._global_forward_hooks or every._global_forward_pre_hooks)
    )


def _best(head: Any, x: Tensor, at: Positions, cache: Cache) -> Next:
    """Logits of tokens among which is the best one of each row."""
    found = head.best(x[:, -1], cache)
    return (head(x, at)[:, -1], None) if found is None else found


class Encoder(Net):
    """Every token sees every token."""

    def __init__(
        self,
        embed: nn.Module,
        stack: Stack | RecurrentStack,
        head: nn.Module | None = None,
        ties: Ties = (),
    ) -> None:
        super().__init__(ties)
        self.embed: Any = embed  # Embedding, PatchEmbedding, AudioEmbedding: `place`, `forward`
        self.stack: Any = stack
        self.head = head
        self.tie()

    def encode(
        self, inputs: Tensor, at: Positions | None = None, types: Ids | None = None
    ) -> Memory:
        """The last states and where they stand. What the inputs are, the embedding knows: ids
        [b, t], images, sound.
        """
        at = self.embed.place(inputs, at)
        return Memory(self.stack(self.embed(inputs, at, types), at), at)

    def forward(
        self, inputs: Tensor, at: Positions | None = None, types: Ids | None = None
    ) -> Tensor:
        """The head's output, or the last states [b, t, m] where there is no head."""
        memory = self.encode(inputs, at, types)
        return memory.x if self.head is None else self.head(memory.x, memory.at)


class Decoder(Net):
    """Every token sees those before it."""

    def __init__(
        self,
        embed: Embedding,
        stack: Stack | RecurrentStack,
        head: nn.Module | None,
        ties: Ties = (),
    ) -> None:
        super().__init__(ties)
        self.embed = embed
        self.stack: Any = stack  # before the head: weights are drawn in the order of the modules
        self.head = head
        self.tie()

    def states(
        self,
        ids: Ids,
        at: Positions | None = None,
        cache: Cache | None = None,
        memory: Memory | None = None,
    ) -> Float[Tensor, "b t m"]:
        """The last states, before the head."""
        at = self.embed.place(ids, at, cache)
        return self.stack(self.embed(ids, at), at, cache, memory)

    def decode(self, ids: Ids, at: Positions | None = None, cache: Cache | None = None) -> Tensor:
        """Logits [b, t, v] (or the head's output); with a cache the ids follow what it holds."""
        at = self.embed.place(ids, at, cache)
        x = self.states(ids, at, cache)
        return x if self.head is None else self.head(x, at)

    def decode_last(
        self, ids: Ids, at: Positions, cache: Cache, last: Int[Tensor, " b"]
    ) -> Float[Tensor, "b v"]:
        """`decode` where only the logits at slot last[i] of row i are asked for: of a long prompt
        the head, often the largest matrix, has one row to read.
        """
        if self.head is None:
            return super().decode_last(ids, at, cache, last)
        rows = torch.arange(len(ids), device=ids.device)
        x = self.states(ids, at, cache)[rows, last].unsqueeze(1)
        pos = at.pos.expand(len(ids), -1)[rows, last].unsqueeze(1)
        return self.head(x, replace(at, pos=pos, dense=False, ends=None))[:, 0]

    def decode_next(self, ids: Int[Tensor, "b 1"], cache: Cache, greedy: bool = False) -> Next:
        if not greedy or not _finds_best(self, Decoder):
            return super().decode_next(ids, cache)
        at = self.embed.place(ids, None, cache)
        return _best(self.head, self.states(ids, at, cache), at, cache)

    def forward(self, ids: Ids, at: Positions | None = None) -> Tensor:
        return self.decode(ids, at)

    def new_cache(self, rows: int, max_len: int, slack: int = 0, **place: Any) -> Cache:
        """An empty cache for so many rows of at most `max_len` tokens.

        `slack`: see `Stack.new_cache`.
        """
        self.embed.check_room(max_len)
        return self.stack.new_cache(rows, max_len, slack=slack, **self.new_place(place))


class EncoderDecoder(Net):
    """A decoder that looks at an encoder's states in every block."""

    def __init__(
        self, encoder: Encoder, decoder: Decoder, head: nn.Module, ties: Ties = ()
    ) -> None:
        super().__init__(ties)
        self.encoder, self.decoder, self.head = encoder, decoder, head
        self.tie()

    def encode(self, source: Tensor, at: Positions | None = None) -> Memory:
        """The source's states, computed once however long the target becomes."""
        return self.encoder.encode(source, at)

    def decode(
        self,
        target: Ids,
        memory: Memory | None = None,
        at: Positions | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "b t v"]:
        """Logits of the target so far; with a cache the memory is the one it was made for."""
        if cache is not None:
            require(
                memory is None or memory is cache.memory,
                "This cache was made for another memory: pass the one given to new_cache, or none.",
            )
            memory = cache.memory
        if memory is None:
            raise ClearheadError("decode needs what encode returned: decode(target, memory).")
        require(
            target.shape[0] % memory.rows == 0,  # several targets of one source are its beams
            f"{memory.rows} sources cannot be shared by {target.shape[0]} targets.",
        )
        at = self.decoder.embed.place(target, at, cache)
        return self.head(self.decoder.states(target, at, cache, memory), at)

    def decode_next(self, ids: Int[Tensor, "b 1"], cache: Cache, greedy: bool = False) -> Next:
        if not greedy or not _finds_best(self, EncoderDecoder):
            return super().decode_next(ids, cache)
        at = self.decoder.embed.place(ids, None, cache)
        x = self.decoder.states(ids, at, cache, cache.memory)
        return _best(self.head, x, at, cache)

    def forward(
        self,
        source: Tensor,
        target: Ids,
        source_at: Positions | None = None,
        target_at: Positions | None = None,
    ) -> Float[Tensor, "b t v"]:
        """Logits for every position of the target at once (teacher forcing)."""
        require(
            source.shape[0] == target.shape[0],
            f"There are {source.shape[0]} sources and {target.shape[0]} targets: one for each.",
        )
        return self.decode(target, self.encode(source, source_at), target_at)

    def new_cache(
        self, memory: Memory, max_len: int, beams: int = 1, slack: int = 0, **place: Any
    ) -> Cache:
        """An empty cache for these sources, each with so many beams, which share its keys."""
        require(
            isinstance(memory, Memory),
            "The cache of an encoder-decoder is made for its sources: "
            "new_cache(net.encode(source), max_len).",
        )
        self.decoder.embed.check_room(max_len)
        place = self.new_place(place)
        return self.decoder.stack.new_cache(memory.rows * beams, max_len, memory, slack, **place)
