"""A copy of KV and its checksum in one go, for whoever takes KV from memory that is not its own."""

import xxhash

PIECE_BYTES = 256 * 1024
"""Copied and hashed at once: a part of a core's cache, and for how long others may wait for the interpreter lock."""


def copy_and_hash(source: memoryview, into: memoryview) -> int:
    """The checksum (xxh3-64) is of what is in ``into`` afterwards, whatever happens to ``source`` meanwhile."""
    digest = xxhash.xxh3_64()
    for start in range(0, source.nbytes, PIECE_BYTES):
        piece = into[start : start + PIECE_BYTES]
        piece[:] = source[start : start + PIECE_BYTES]
        digest.update(piece)
    return digest.intdigest()
