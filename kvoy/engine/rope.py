"""Frequencies of rotary embeddings under the scalings that model configs name.

Owns the formulas; knows no file format. Each result is a RopeSpec of head_dim / 2 inverse frequencies, computed
in double precision. Torch-free.
"""

import math
from collections.abc import Sequence

from kvoy.core.errors import ModelError
from kvoy.engine.fields import Fields
from kvoy.engine.spec import RopeSpec

SUPPORTED_SCALINGS = ("default", "linear", "llama3", "yarn")


def plain(head_dim: int, base: float) -> RopeSpec:
    """No scaling: base ** (-2 i / head_dim)."""
    if base <= 1:
        raise ModelError(f"the RoPE base must be above 1, not {base}")
    return RopeSpec(tuple(base ** (-2 * i / head_dim) for i in range(head_dim // 2)))


def divided(rope: RopeSpec, divisors: Sequence[float]) -> RopeSpec:
    """Each frequency divided by its own factor (linear scaling, and the table that GGUF files carry)."""
    return RopeSpec(tuple(f / d for f, d in zip(rope.inv_freq, divisors, strict=True)), rope.magnitude)


def linear(head_dim: int, base: float, factor: float) -> RopeSpec:
    """Positions divided by ``factor``."""
    return divided(plain(head_dim, base), [factor] * (head_dim // 2))


def llama3(head_dim: int, base: float, factor: float, *, low: float, high: float, original_tokens: int) -> RopeSpec:
    """Llama 3.1: long waves are divided by ``factor``, short ones kept, those between blended.

    ``low`` and ``high`` say how many waves fit into the ``original_tokens`` of pretraining at the two ends.
    """
    if high <= low:
        raise ModelError(f"llama3 RoPE scaling needs high_freq_factor > low_freq_factor, not {high} and {low}")

    def scaled(frequency: float) -> float:
        waves = original_tokens * frequency / (2 * math.pi)
        kept = min(1.0, max(0.0, (waves - low) / (high - low)))
        return (1 - kept) * frequency / factor + kept * frequency

    return RopeSpec(tuple(scaled(f) for f in plain(head_dim, base).inv_freq))


def yarn(
    head_dim: int,
    base: float,
    factor: float,
    original_tokens: int,
    *,
    magnitude: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> RopeSpec:
    """YaRN (arXiv 2309.00071): dimensions that turn less than ``beta_slow`` times within ``original_tokens`` are
    divided by ``factor``, those that turn more than ``beta_fast`` times are kept, with a linear ramp between."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(original_tokens / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001

    def scaled(i: int, frequency: float) -> float:
        interpolated = min(1.0, max(0.0, (i - low) / width))
        return interpolated * frequency / factor + (1 - interpolated) * frequency

    frequencies = tuple(scaled(i, f) for i, f in enumerate(plain(head_dim, base).inv_freq))
    return RopeSpec(frequencies, yarn_magnitude(factor) if magnitude is None else magnitude)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies cos and sin by, when the config does not say."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def from_parameters(parameters: Fields, head_dim: int, base: float, context_tokens: int) -> RopeSpec:
    """From a rope_parameters or rope_scaling object of a Hugging Face config; an empty one is no scaling."""
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    base = parameters.number("rope_theta", base)
    if parameters.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{parameters.source} rotates only a part of each head, which kvoy does not support")
    match kind:
        case "default":
            return plain(head_dim, base)
        case "linear":
            return linear(head_dim, base, parameters.number("factor"))
        case "llama3":
            return llama3(
                head_dim,
                base,
                parameters.number("factor"),
                low=parameters.number("low_freq_factor"),
                high=parameters.number("high_freq_factor"),
                original_tokens=parameters.integer("original_max_position_embeddings", context_tokens),
            )
        case "yarn":
            return _yarn_from_parameters(parameters, head_dim, base, context_tokens)
    raise ModelError(
        f"{parameters.source} asks for {kind!r} RoPE scaling; kvoy supports {', '.join(SUPPORTED_SCALINGS)}"
    )


def _yarn_from_parameters(parameters: Fields, head_dim: int, base: float, context_tokens: int) -> RopeSpec:
    original_tokens = parameters.integer("original_max_position_embeddings", context_tokens)
    factor = parameters.number("factor", context_tokens / original_tokens)
    magnitude = parameters.number("attention_factor") if parameters.has("attention_factor") else None
    if magnitude is None and parameters.has("mscale") and parameters.has("mscale_all_dim"):
        above, below = parameters.number("mscale"), parameters.number("mscale_all_dim")
        magnitude = yarn_magnitude(factor, above) / yarn_magnitude(factor, below)
    return yarn(
        head_dim,
        base,
        factor,
        original_tokens,
        magnitude=magnitude,
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        truncate=parameters.flag("truncate", True),
    )
