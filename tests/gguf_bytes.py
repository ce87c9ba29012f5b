"""GGUF files by hand, byte for byte, so that they can lie."""

from __future__ import annotations

import struct

U32, I32, F32, BOOL, TEXT, LIST = 4, 5, 6, 7, 8, 9


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def setting(key, kind, payload):
    return text(key) + struct.pack("<I", kind) + payload


def entry(name, dims, kind=0, offset=0, n_dims=None):
    """A tensor's line; `dims` are the fastest first."""
    count = len(dims) if n_dims is None else n_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def file(settings=(), entries=(), data=b"", *, alignment=32, **lies):
    """A whole file; `lies` may replace magic, version, n_tensors, n_settings."""
    head = lies.get("magic", b"GGUF") + struct.pack(
        "<IQQ",
        lies.get("version", 3),
        lies.get("n_tensors", len(entries)),
        lies.get("n_settings", len(settings)),
    )
    head += b"".join(settings) + b"".join(entries)
    return head + b"\0" * (-len(head) % alignment) + data
