"""Keys and values of a span as right tiles (kernels/amx.py), from wherever in the pool their blocks are.

Knows the pool's formats; what is computed with the tiles is in compiled.py.
"""

import numpy as np

from kernels import jit, vectors
from kernels.amx import DEPTH, TILE_BYTES, TILE_ROWS
from kernels.chunk_prefill.weights import store_pairs
from kernels.jit import BF16, FP32, INT8
from kernels.vectors import LANES

STEP = 64
"""Keys whose scores are computed at once: four tiles."""


@jit.inner
def lay_out(
    table, pool, block_step, block_tokens, begin, first_key, end_key, keys, values, lines, staging, head_dim, kv_code
):  # fmt: skip
    """Keys and values of a span as right tiles. What no row sees is multiplied by weights of zero, and is zeros: from a
    multiple of STEP to ``first_key``, and from ``end_key`` to the next 32nd."""
    found = jit.int64s(lines, DEPTH)
    for key in range(max(begin, first_key // STEP * STEP), end_key, DEPTH):
        _find(table, pool, block_step, block_tokens, key, first_key, end_key, lines, staging, head_dim, kv_code)
        tile = (key - begin) * head_dim * 2
        for half in range(2):
            for part in range(head_dim // DEPTH):
                vectors.transpose(lines + half * TILE_ROWS * 8, part * 64, keys + tile)
                tile += TILE_BYTES
        into = values + (key - begin) * head_dim * 2
        for i in range(TILE_ROWS):  # as weights come: key k beside key k + 16
            one, two = found[i] + head_dim * 2, found[i + TILE_ROWS] + head_dim * 2
            for part in range(head_dim // LANES):
                store_pairs(one + part * 32, two + part * 32, into + part * TILE_BYTES + i * 64)


@jit.inner
def _find(
    table, pool, block_step, block_tokens, key, first_key, end_key, lines, staging, head_dim, kv_code
):  # fmt: skip
    """The addresses of 32 keys, each with its values, in bf16: in the pool, or in ``staging``."""
    found, line_bytes = jit.int64s(lines, DEPTH), 2 * head_dim * jit.item_bytes(kv_code)
    block, place = key // block_tokens, key % block_tokens
    for i in range(DEPTH):
        into = staging + i * head_dim * 4
        found[i] = into
        if key + i < first_key or key + i >= end_key:
            jit.fill(into, head_dim, np.float32(0))
        else:
            tile = pool + jit.int32s(table + block * 4, 1)[0] * block_step
            line = tile + place * line_bytes
            if kv_code == BF16:
                found[i] = line
            elif kv_code == FP32:
                vectors.convert(line, FP32, into, BF16, 2 * head_dim)
            else:
                steps = tile + block_tokens * 2 * head_dim + place * 4
                vectors.scale(line, INT8, into, BF16, head_dim, jit.fp16_number(steps))
                vectors.scale(line + head_dim, INT8, into + head_dim * 2, BF16, head_dim, jit.fp16_number(steps + 2))
            if key + i + 2 * block_tokens < end_key:  # memory is slow to find what lies in another block
                ahead = pool + jit.int32s(table + block * 4 + 8, 1)[0] * block_step
                jit.prefetch(ahead + place * line_bytes, line_bytes)
        place += 1
        if place == block_tokens:
            block, place = block + 1, 0
