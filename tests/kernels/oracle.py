"""What bytes of KV mean and how numbers become int8, written a second time, in numpy, for tests to compare with."""

import numpy as np
import torch
from torch import Tensor

from kernels.paged import KvFormat, PagedPool, PoolShape, TileStrides

INT8 = KvFormat(torch.int8, "token")
CHANNEL = KvFormat(torch.int8, "channel")


def quantised(x: Tensor, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and scales with size 1 along ``axis``."""
    wide = x.float().numpy()
    scale = np.minimum(np.abs(wide).max(axis, keepdims=True) / np.float32(127), np.float32(65504)).astype(np.float16)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.clip(np.rint(wide / scale.astype(np.float32)), -127, 127)
    return np.where(scale > 0, codes, 0).astype(np.int8), scale


def decoded(tiles: Tensor, fmt: KvFormat, head_dim: int) -> Tensor:
    """Float64 [..., block tokens, k | v, head dim] of tiles [..., bytes]."""
    if fmt.scales == "none":
        return tiles.contiguous().view(fmt.dtype).double().unflatten(-1, (-1, 2, head_dim))
    raw = tiles.contiguous().numpy()
    fixed = 2 * head_dim if fmt.scales == "channel" else 0
    block_tokens = (raw.shape[-1] - fixed) // (2 * head_dim + (2 if fmt.scales == "channel" else 4))
    codes = raw[..., : block_tokens * 2 * head_dim].view(np.int8).astype(np.float64)
    codes = codes.reshape(*raw.shape[:-1], block_tokens, 2, head_dim)
    scales = np.ascontiguousarray(raw[..., block_tokens * 2 * head_dim :]).view(np.float16).astype(np.float64)
    if fmt.scales == "token":
        return torch.from_numpy(codes * scales.reshape(*raw.shape[:-1], block_tokens, 2, 1))
    k = codes[..., 0, :] * scales[..., None, :head_dim]
    v = codes[..., 1, :] * scales[..., head_dim:, None]
    return torch.from_numpy(np.stack((k, v), -2))


def encoded(numbers: Tensor, fmt: KvFormat) -> Tensor:
    """Tiles [..., bytes] of numbers [..., block tokens, k | v, head dim]."""
    lead = numbers.shape[:-3]
    if fmt.scales == "none":
        return numbers.to(fmt.dtype).reshape(*lead, -1).view(torch.uint8)
    if fmt.scales == "token":
        codes, scales = quantised(numbers, -1)
    else:
        k, k_scales = quantised(numbers[..., 0, :], -2)
        v, v_scales = quantised(numbers[..., 1, :], -1)
        codes, scales = np.stack((k, v), -2), np.concatenate((k_scales[..., 0, :], v_scales[..., 0]), -1)
    parts = [codes.reshape(*lead, -1).view(np.uint8), np.ascontiguousarray(scales).reshape(*lead, -1).view(np.uint8)]
    return torch.from_numpy(np.concatenate(parts, -1))


def pool_of(fmt: KvFormat, shape: PoolShape, order: str, buffer: Tensor | None = None) -> PagedPool:
    """A pool whose axes block, layer and kv head lie in memory in ``order``, over new zeros or the given bytes."""
    sizes, steps, step = {"B": shape.blocks, "L": shape.layers, "H": shape.kv_heads}, {}, 1
    for axis in reversed(order[:3]):
        steps[axis] = step
        step *= sizes[axis]
    if buffer is None:
        buffer = torch.zeros(step * fmt.tile_bytes(shape.block_tokens, shape.head_dim), dtype=torch.uint8)
    return PagedPool(buffer, fmt, shape, TileStrides(steps["B"], steps["L"], steps["H"]))


def poison(pool: PagedPool) -> PagedPool:
    """Random codes with NaN scales, or NaN."""
    if pool.scales is None:
        pool.values.fill_(float("nan"))
    else:
        pool.values.random_(-128, 128)
        pool.scales.fill_(float("nan"))
    return pool


def tile_bytes(pool: PagedPool) -> Tensor:
    """A copy of all tiles, [blocks, layers, kv heads, bytes]."""
    shape = pool.shape
    return pool.grid.contiguous().view(torch.uint8).view(shape.blocks, shape.layers, shape.kv_heads, -1)
