"""Files of named data sets: found where CLEARHEAD_DATA says, or downloaded once and checked.

The folder of a set is `$CLEARHEAD_DATA/<set>`; what is downloaded goes to `$CLEARHEAD_CACHE`
(~/.cache/clearhead), into data/<set>. A download is written beside its place, hashed, and renamed:
half a file never looks like a whole one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path

from clearhead.data.files import BLOCK, File
from clearhead.errors import ClearheadError, require
from clearhead.paths import cache_folder

Progress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes that are there, and how many there will be if known."""

SECONDS = 30  # without a byte, after which a download is given up


@dataclasses.dataclass(frozen=True)
class Remote:
    """A file of a named set."""

    name: str
    """What the file is called."""
    sha256: str = ""
    """Of its bytes as published."""
    url: str = ""
    """Where it can be had; empty where no address is known to last."""


def locate(folder: str, remote: Remote, about: str, progress: Progress | None = None) -> File:
    """A file of a set: the user's own (packed or not), one downloaded before, or a new download."""
    own = os.environ.get("CLEARHEAD_DATA")
    bare = remote.name.removesuffix(".gz")
    for base in (
        Path(own).expanduser() / folder if own else None,
        cache_folder() / "data" / folder,
    ):
        for name in (remote.name, bare):
            if base is not None and (base / name).is_file():
                return File(base / name)
    place = f"$CLEARHEAD_DATA/{folder}/{remote.name}"
    where = f"(CLEARHEAD_DATA is {own})" if own else "(CLEARHEAD_DATA is not set)"
    require(
        bool(remote.url),
        f'The data set "{folder}" needs {place} {where}, and it is not downloaded by itself. '
        f"{about}",
    )
    try:
        return File(
            download(remote, cache_folder() / "data" / folder / remote.name, progress=progress)
        )
    except (OSError, http.client.HTTPException) as error:
        raise ClearheadError(
            f'The data set "{folder}" needs {place} {where}, and the download failed ({error}). '
            f"Without a connection, put the file there; it is published at {remote.url}"
        ) from error


def download(remote: Remote, into: Path, progress: Progress | None = None) -> Path:
    """Fetch a file, compare its hash with the published one, and put it into its place."""
    into.parent.mkdir(parents=True, exist_ok=True)
    part = into.with_name(f"{into.name}.{os.getpid()}.part")
    digest, there = hashlib.sha256(), 0
    try:
        with urllib.request.urlopen(remote.url, timeout=SECONDS) as answer, part.open("wb") as file:
            size = answer.headers.get("Content-Length")
            while block := answer.read(BLOCK):
                file.write(block)
                digest.update(block)
                there += len(block)
                if progress:
                    progress(remote.name, there, int(size) if size else None)
        require(
            digest.hexdigest() == remote.sha256,
            f"{remote.url} is not the file that was published: its sha256 is "
            f"{digest.hexdigest()}, expected {remote.sha256}. Nothing was kept; the connection may "
            "have been cut short, or the file changed.",
        )
        os.replace(part, into)
    finally:
        part.unlink(missing_ok=True)
    return into
