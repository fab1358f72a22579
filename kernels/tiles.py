"""What the bytes of tiles mean, in torch: numbers out of them and into them, in every format of kernels/paged.py.

Knows no pool: tiles come as rows of bytes. kernels/kv_pack/kernel.py reads and writes the same layout on a GPU.
"""

import torch
from torch import Tensor

from kernels.int8 import quantise
from kernels.paged import KvFormat


def read_tiles(tiles: Tensor, fmt: KvFormat, head_dim: int) -> Tensor:
    """[..., block tokens, k | v, head dim] of tiles [..., elements of a tile]: a view of them when they are floats, new
    fp32 numbers when they are int8."""
    if fmt.scales == "none":
        return tiles.view(fmt.dtype).view(*tiles.shape[:-1], -1, 2, head_dim)
    codes, scales = int8_parts(tiles, fmt, head_dim)
    numbers = codes.float()
    if fmt.scales == "token":
        return numbers.mul_(scales.view(codes.shape[:-1]).float().unsqueeze(-1))
    numbers[..., 0, :].mul_(scales[..., None, :head_dim].float())
    numbers[..., 1, :].mul_(scales[..., head_dim:, None].float())
    return numbers


def write_tiles(numbers: Tensor, tiles: Tensor, fmt: KvFormat) -> None:
    """The inverse; int8 is rounded here."""
    head_dim = numbers.shape[-1]
    if fmt.scales == "none":
        tiles.view(fmt.dtype).view(numbers.shape).copy_(numbers)
        return
    codes, scales = int8_parts(tiles, fmt, head_dim)
    if fmt.scales == "token":
        found, scale = quantise(numbers, -1)
        codes.copy_(found)
        scales.view(codes.shape[:-1]).copy_(scale.squeeze(-1))
        return
    k, k_scale = quantise(numbers[..., 0, :], -2)
    v, v_scale = quantise(numbers[..., 1, :], -1)
    codes[..., 0, :].copy_(k)
    codes[..., 1, :].copy_(v)
    scales[..., :head_dim].copy_(k_scale.squeeze(-2))
    scales[..., head_dim:].copy_(v_scale.squeeze(-1))


def int8_parts(tiles: Tensor, fmt: KvFormat, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views: codes [..., block tokens, k | v, head dim] and fp16 scales [..., of a tile]."""
    tile_bytes, fixed = tiles.shape[-1], fmt.tile_bytes(0, head_dim)
    block_tokens = (tile_bytes - fixed) // (fmt.tile_bytes(1, head_dim) - fixed)
    codes_bytes = block_tokens * 2 * head_dim
    codes = tiles.view(torch.int8)[..., :codes_bytes].view(*tiles.shape[:-1], block_tokens, 2, head_dim)
    return codes, tiles.view(torch.float16)[..., codes_bytes // 2 :]
