"""The engine without its process: what it says of itself, and which settings it refuses with which sentence."""

import os
from dataclasses import replace

import pytest

from kvoy.core.errors import ConfigError, InvariantError
from kvoy.core.types import KvDtype
from kvoy.engine.engine import Engine
from kvoy.engine.messages import EngineSettings, ExportBlocks
from kvoy.engine.slab import nameless_file
from tests.engine.running import FAMILIES

SETTINGS = EngineSettings(
    model=str(FAMILIES / "qwen2"),
    dtype="bf16",
    block_tokens=4,
    pool_bytes=1 << 20,
    slot_bytes=0,
    slots=2,
    threads=1,
)


def start(settings: EngineSettings) -> Engine:
    return Engine(settings, nameless_file(), progress=lambda _: None)


def test_ready_says_what_the_engine_is():
    ready = start(replace(SETTINGS, context_tokens=100)).ready
    assert ready.model.name == "qwen2"
    assert ready.model.context_tokens == 100
    assert ready.model.vocab_tokens == 96
    assert len(bytes.fromhex(ready.model.fingerprint)) == 16
    assert ready.kv_spec.dtype is KvDtype.BF16
    assert ready.pool_blocks == (1 << 20) // ready.kv_spec.block_bytes
    assert ready.eos_token_ids == (2,)
    assert ready.load_s > 0


def test_the_context_is_at_most_what_the_model_can_do():
    assert start(replace(SETTINGS, context_tokens=10**6)).ready.model.context_tokens == 128


@pytest.mark.parametrize(
    "change", [{"context_tokens": 1}, {"pool_bytes": 4 * 2 * 32 * 4 * 2, "block_tokens": 8}, {"block_tokens": 1}]
)
def test_the_smallest_engines_warm_up_too(change):
    assert start(replace(SETTINGS, **change)).ready.pool_blocks >= 1


def test_a_slot_that_is_not_there_is_refused():
    engine = start(SETTINGS)
    for slot in (-1, 2):
        with pytest.raises(InvariantError):
            engine.obey(ExportBlocks(1, slot, (0,), 0, 1, 4))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": "no-such-model"}, "there is no model 'no-such-model'"),
        ({"dtype": "fp8"}, "dtype 'fp8' is not known; use fp32, bf16, int4"),
        ({"kv_dtype": "int4"}, "kv_dtype 'int4' is not known; use auto, fp32, bf16, int8"),
        ({"device": "abacus"}, "there is no device 'abacus' here; use cpu"),
        ({"pool_bytes": 1 << 60}, r"a KV pool of 1,073,741,824\.0 GiB, .* do not fit .*; lower pool_bytes"),
        ({"pool_bytes": 100}, "pool_bytes of 100 hold no KV block"),
        ({"block_tokens": 0}, "block_tokens must be at least 1, not 0"),
        ({"slots": 0}, "slots must be at least 1, not 0"),
        ({"slot_bytes": -1}, "slot_bytes must not be negative, as -1 is"),
        ({"context_tokens": -5}, "context_tokens must not be negative, as -5 is"),
        ({"threads": 0}, "threads must be at least 1, not 0"),
        ({"threads": 100_000}, "threads is 100000, but this process may use"),
        ({"slots": 10**9}, "do not fit into .* lower pool_bytes, slots or slot_bytes"),
        ({"block_tokens": 10**9}, "raise pool_bytes or lower block_tokens"),
        ({"deterministic": True}, "deterministic needs dtype fp32, not bf16; change one of the two"),
        ({"deterministic": True, "dtype": "fp32", "kv_dtype": "int8"}, "deterministic needs a KV pool in fp32"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_sentence(change, sentence):
    fd = nameless_file()
    with pytest.raises(ConfigError, match=sentence):
        Engine(replace(SETTINGS, **change), fd, progress=lambda _: None)
    os.close(fd)
