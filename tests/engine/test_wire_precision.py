"""What int8 on the wire costs: golden prompts' KV packed by channel and unpacked again, then decoded teacher-forced."""

from dataclasses import replace

import pytest
import torch

from kvoy.core.types import KvDtype
from kvoy.core.wire import WireRun
from kvoy.engine.kv_cache import KvPool
from kvoy.engine.messages import ExportBlocks, ImportBlocks
from tests.engine.running import load
from tests.engine.test_precision import BLOCKS, CASES, Forced, divergence, forced

MAX_KL, MIN_TOP1, MAX_BYTES = 5e-4, 0.98, 0.54
"""KL in nats, from KV that was sent as it is; bytes of what bf16 takes."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def loaded(smollm2):
    return load(smollm2, blocks=BLOCKS, block_tokens=16)


@pytest.fixture(scope="module")
def reference(loaded) -> list[torch.Tensor]:
    return forced(*loaded, CASES)


def sent(pool: KvPool, row: Forced, *, partial_too: bool = True) -> None:
    """The prompt's blocks through the wire and back into their places; the last one, if it is not full, maybe not."""
    spec, tokens = pool.layout.spec, len(row.prompt)
    blocks = row.table[: spec.blocks_for(tokens) if partial_too else tokens // spec.block_tokens]
    slot = memoryview(bytearray(len(blocks) * replace(spec, dtype=KvDtype.INT8_CHANNEL).block_bytes))
    valid_tokens = min(tokens, len(blocks) * spec.block_tokens)
    if blocks:
        pool.export_blocks(ExportBlocks(1, 0, blocks, 0, spec.layers, valid_tokens, KvDtype.INT8_CHANNEL), slot)
        run = WireRun(KvDtype.INT8_CHANNEL, spec.block_tokens, len(blocks))
        pool.import_blocks(ImportBlocks(1, 0, blocks, 0, spec.layers, run), slot)


@pytest.mark.parametrize("partial_too", [True, False], ids=["all blocks", "whole blocks"])
def test_int8_on_the_wire_hardly_shows_on_the_goldens(loaded, reference, partial_too):
    decoder, pool = loaded
    found = forced(decoder, pool, CASES, handed_over=lambda row: sent(pool, row, partial_too=partial_too))
    pairs = [(theirs[1:], ours[1:]) for theirs, ours in zip(reference, found, strict=True)]  # prefill said the first
    kl = torch.cat([divergence(*pair) for pair in pairs]).mean().item()
    top1 = torch.cat([theirs.argmax(-1) == ours.argmax(-1) for theirs, ours in pairs]).double().mean().item()
    print(f"KL {kl:.3g}, top-1 {top1:.4f}, of {sum(len(pair[0]) for pair in pairs)} tokens")
    assert kl <= MAX_KL
    assert top1 >= MIN_TOP1


def test_int8_on_the_wire_is_little_more_than_half_of_bf16(loaded):
    spec = loaded[1].layout.spec
    wire, bf16 = (replace(spec, dtype=dtype).block_bytes for dtype in (KvDtype.INT8_CHANNEL, KvDtype.BF16))
    print(f"{wire / bf16:.4f} of bf16")
    assert wire <= MAX_BYTES * bf16
