"""Block ids: what a block is called in every pool, store and index, in every process and release.

An id names the block's tokens and all tokens before it (through the parent's id), the model and the tenant's salt.
Each part is written with its length before it, so that no two different keys read the same. The layout below is
part of what is kept on disks: change it only together with a way to tell old ids from new ones.
"""

from collections.abc import Sequence
from hashlib import blake2b

from kvoy.core.errors import InvariantError

ID_BYTES = 16
_LENGTH_BYTES = 4
_TOKEN_BYTES = 4


def block_ids(
    token_ids: Sequence[int], block_tokens: int, fingerprint: str, cache_salt: str, *, parent: bytes = b""
) -> list[bytes]:
    """Ids of the full blocks of ``token_ids``, first block first; a partial last block has none.

    ``parent`` is the id of the block just before ``token_ids`` (empty at the start of a sequence): a turn that
    goes on from known blocks hashes only what is new.
    """
    if parent and len(parent) != ID_BYTES:
        raise InvariantError(f"a parent id has {ID_BYTES} bytes, not {len(parent)}")
    key = _part(fingerprint.encode()) + _part(cache_salt.encode())
    ids: list[bytes] = []
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        tokens = b"".join(token.to_bytes(_TOKEN_BYTES, "little") for token in token_ids[start : start + block_tokens])
        parent = blake2b(_part(parent) + _part(tokens) + key, digest_size=ID_BYTES).digest()
        ids.append(parent)
    return ids


def _part(value: bytes) -> bytes:
    return len(value).to_bytes(_LENGTH_BYTES, "little") + value
