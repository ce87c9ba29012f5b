"""Text from ids as they come.

What has been given out never changes, and no character is given out in halves.

A token may hold part of a character (three bytes of an emoji's four), so the end of the text so
far is not always final. What is held back: a last U+FFFD, which more bytes may turn into another
(all before it is final: one that can no longer be completed has its U+FFFD already); and a run of
byte tokens (<0xF0> ...), which sentencepiece's decoders judge as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

BROKEN = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class DecodeStream:
    """`feed` takes ids and returns the text that has become certain; `flush` returns the rest.

    The pieces together are what decoding all ids at once gives. `token` names the token of an id,
    or is None for an id that decoding leaves out.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], token: Callable[[int], str | None]
    ) -> None:
        self._decode, self._token = decode, token
        # A first token is decoded differently from a later one (its blank is dropped), so a window
        # begins with tokens whose text is already out: `_given` characters of it are.
        self._window: list[int] = []
        self._given = 0

    def feed(self, *ids: int) -> str:
        """The text that these ids have made certain, often nothing."""
        return "".join(self._feed_one(int(id)) for id in ids)

    def follow(self, *ids: int) -> None:
        """Begin behind these ids, whose text is out already: so that a word which follows them
        keeps its blank.
        """
        self.feed(*ids)
        self._given = len(self._decode(self._window)) if self._window else 0

    def flush(self) -> str:
        """What was held back, as it stands. The stream can be used for a new text then."""
        rest = self._decode(self._window)[self._given :] if self._window else ""
        self._window, self._given = [], 0
        return rest

    def _feed_one(self, id: int) -> str:
        token = self._token(id)
        if token is None:  # left out by decode as well, so it parts nothing
            return ""
        self._window.append(id)
        if BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._decode(self._window)
        certain = text[: -len(BROKEN)] if text.endswith(BROKEN) else text
        piece = certain[self._given :]
        self._given += len(piece)
        if piece and certain == text:  # the window can begin anew at a clean cut
            last = self._decode([id])
            if last:
                self._window, self._given = [id], len(last)
        return piece
