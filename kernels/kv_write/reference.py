"""Plain torch twin of KvWrite: the specification, and what the CPU runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.int8 import quantise
from kernels.paged import PagedLayer, place_rows
from kernels.rms_norm import reference as rms_norm

_ROTATE_TOKENS = 256
"""Rotated at a time: what is between the operators then stays in a core's cache."""

if TYPE_CHECKING:
    from kernels.kv_write import Angles, QkNorm


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the tokens go, the same in every layer."""

    slots: Tensor
    rows: Tensor
    """Of PagedLayer.places."""
    tokens: Tensor | None
    """Which tokens those are; None: all."""


def plan(slots: Tensor, kv: PagedLayer) -> Plan:
    real = (slots >= 0).nonzero().view(-1)
    if real.shape[0] == slots.shape[0]:
        return Plan(slots, place_rows(kv, slots), None)
    return Plan(slots[real], place_rows(kv, slots[real]), real)


def run(where: Plan, qkv: Tensor, angles: Angles, kv: PagedLayer, norms: QkNorm | None) -> None:
    tokens, rows, head_dim = qkv.shape
    heads, kv_heads = rows - 2 * kv.kv_heads, kv.kv_heads
    if norms is not None:
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        rms_norm.rms_norm(q, norms.q_weight, norms.eps, q)
        rms_norm.rms_norm(k, norms.k_weight, norms.eps, k)
    cos, sin = angles.cos.unsqueeze(1), angles.sin.unsqueeze(1)
    for first in range(0, tokens, _ROTATE_TOKENS):
        some = slice(first, first + _ROTATE_TOKENS)
        _rotate(qkv[some, : heads + kv_heads], cos[some], sin[some])
    new = qkv[:, heads:] if where.tokens is None else qkv[where.tokens, heads:]
    new = new.view(new.shape[0], 2, kv_heads, head_dim)
    if kv.scales is None:
        kv.places.index_copy_(0, where.rows, new.to(kv.values.dtype))
    else:
        _store_int8(where.slots, new.transpose(1, 2), kv, kv.scales)


def _store_int8(slots: Tensor, new: Tensor, kv: PagedLayer, scales: Tensor) -> None:
    """``new`` [tokens, kv heads, k | v, head dim]."""
    codes, scale = quantise(new, -1)
    blocks = slots.div(kv.block_tokens, rounding_mode="floor")
    places = slots - blocks * kv.block_tokens
    kv.values[blocks, :, places] = codes.flatten(2)
    scales[blocks, :, places] = scale.squeeze(-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """In place, of x [tokens, heads, head dim]; one conversion to fp32 and one back, for mixed dtypes are slow."""
    wide = x.float()
    rotated = torch.empty_like(wide)
    (a, b), (first, second) = wide.chunk(2, -1), rotated.chunk(2, -1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second).addcmul_(a, sin)
    x.copy_(rotated)
