"""Sizes of KV: what slots, frames, pools and the kvstore count with."""

import pytest

from kvoy.core.types import KvDtype, KvSpec

SMOLLM2 = (30, 3, 64, 16)
GEMMA3 = (18, 1, 256, 16)


@pytest.mark.parametrize(
    ("shape", "dtype", "block_bytes"),
    [
        (SMOLLM2, KvDtype.FP32, 16 * 46_080),
        (SMOLLM2, KvDtype.BF16, 16 * 23_040),
        (SMOLLM2, KvDtype.INT8, 16 * (23_040 // 2 + 30 * 3 * 4)),
        (GEMMA3, KvDtype.BF16, 16 * 18_432),
        (GEMMA3, KvDtype.INT8, 16 * (18_432 // 2 + 18 * 4)),
    ],
)
def test_a_block_is_its_numbers_and_their_scales(shape, dtype, block_bytes):
    spec = KvSpec(*shape, dtype)
    assert spec.block_bytes == spec.layers * spec.layer_bytes == block_bytes


@pytest.mark.parametrize(("shape", "ratio"), [(SMOLLM2, 1.939), (GEMMA3, 1.984)])
def test_int8_takes_about_half_of_bf16(shape, ratio):
    found = KvSpec(*shape, KvDtype.BF16).block_bytes / KvSpec(*shape, KvDtype.INT8).block_bytes
    assert found == pytest.approx(ratio, abs=1e-3)


def test_a_spec_is_told_in_words():
    assert str(KvSpec(*SMOLLM2, KvDtype.INT8)) == "int8 in blocks of 16 tokens, 30 layers of 3 kv heads of 64"


@pytest.mark.parametrize("dtype", KvDtype)
def test_a_dtype_is_known_by_its_label(dtype):
    assert KvDtype.of(dtype.label) is dtype
