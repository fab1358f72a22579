"""What can be said of an engine's settings before anything is loaded: a sentence with what to do, or nothing.

Owns the bounds of each number and the question whether it will all fit into memory. Torch-free but for the formats.
"""

import math

import torch

from kvoy.core.errors import ConfigError
from kvoy.core.types import KvDtype
from kvoy.engine.cores import usable_cores
from kvoy.engine.memory import available_bytes
from kvoy.engine.messages import EngineSettings
from kvoy.engine.quant import EXTRA_BYTES
from kvoy.engine.spec import ModelSpec, weight_shapes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int4": torch.bfloat16}
"""What is computed in: int4 is bf16, with the weights of a step of few rows in four bits (kvoy.engine.quant)."""
KV_DTYPES = {"fp32": KvDtype.FP32, "bf16": KvDtype.BF16, "int8": KvDtype.INT8}
_THREADS_PER_CORE = 4
_ALWAYS_ALLOWED_THREADS = 16
"""More threads than cores are slow but work; thousands are a mistake that exhausts the machine."""


def check_settings(settings: EngineSettings) -> None:
    """ConfigError for a value that no model could run with; of the device, kvoy.engine.device says that."""
    if settings.dtype not in DTYPES:
        raise ConfigError(f"dtype {settings.dtype!r} is not known; use {', '.join(DTYPES)}")
    if settings.kv_dtype not in ("auto", *KV_DTYPES):
        raise ConfigError(f"kv_dtype {settings.kv_dtype!r} is not known; use auto, {', '.join(KV_DTYPES)}")
    _check_numbers(settings)
    if settings.deterministic:
        _check_deterministic(settings)


def _check_numbers(settings: EngineSettings) -> None:
    for name in ("block_tokens", "slots", "threads"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"{name} must be at least 1, not {getattr(settings, name)}")
    for name in ("pool_bytes", "slot_bytes", "context_tokens"):
        if getattr(settings, name) < 0:
            raise ConfigError(f"{name} must not be negative, as {getattr(settings, name)} is")
    cores = usable_cores()
    if settings.threads > max(_ALWAYS_ALLOWED_THREADS, _THREADS_PER_CORE * cores):
        raise ConfigError(
            f"threads is {settings.threads}, but this process may use {cores} cores; give it at most those"
        )


def _check_deterministic(settings: EngineSettings) -> None:
    """In other formats the operators split their sums by the number of rows, and nobody can check every case."""
    if settings.device == "cuda":
        raise ConfigError(f"deterministic needs device cpu, not {settings.device}; change one of the two")
    if settings.dtype != "fp32":
        raise ConfigError(f"deterministic needs dtype fp32, not {settings.dtype}; change one of the two")
    if settings.kv_dtype not in ("auto", "fp32"):
        raise ConfigError(f"deterministic needs a KV pool in fp32, not {settings.kv_dtype}; change one of the two")


def check_memory(settings: EngineSettings, spec: ModelSpec, slab_bytes: int) -> None:
    """ConfigError when weights, pool and slab clearly cannot all be in memory: better now than in the middle of work,
    when the kernel ends the process without a word."""
    available = available_bytes()
    if available is None:
        return
    weights = _weight_bytes(settings, spec)
    if weights > available:
        raise ConfigError(
            f"the model's weights take {_size(weights)} in {settings.dtype}, but {_size(available)} of memory can be "
            "had here; use a smaller model" + (" or dtype bf16" if settings.dtype == "fp32" else "")
        )
    if settings.pool_bytes + weights + slab_bytes > available:
        raise ConfigError(
            f"a KV pool of {_size(settings.pool_bytes)}, weights of {_size(weights)} and staging slots of "
            f"{_size(slab_bytes)} do not fit into the {_size(available)} of memory that can be had here; "
            "lower pool_bytes" + (", slots or slot_bytes" if slab_bytes > settings.pool_bytes else "")
        )


def _weight_bytes(settings: EngineSettings, spec: ModelSpec) -> int:
    item_bytes = DTYPES[settings.dtype].itemsize + (EXTRA_BYTES if settings.dtype == "int4" else 0)
    return int(sum(math.prod(shape) for shape in weight_shapes(spec).values()) * item_bytes)


def kv_dtype_of(settings: EngineSettings) -> KvDtype:
    """Of the pool; ``auto`` is what is computed in."""
    own = "fp32" if DTYPES[settings.dtype] is torch.float32 else "bf16"
    return KV_DTYPES[own if settings.kv_dtype == "auto" else settings.kv_dtype]


def _size(count: int) -> str:
    return f"{count / (1 << 30):,.1f} GiB" if count >= 1 << 30 else f"{-(-count // (1 << 20)):,} MiB"
