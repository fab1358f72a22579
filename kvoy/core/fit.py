"""Whether a pod can serve a request at all, whatever else is going on there: a function, no state."""

from dataclasses import dataclass

from kvoy.core.types import KvSpec, Request


@dataclass(frozen=True, slots=True)
class Fit:
    """What a pod serves and how large it is."""

    spec: KvSpec
    fingerprint: str
    context_tokens: int
    pool_blocks: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """``reason`` is for machines (a RejectReason's value, see also WorkFailed), ``message`` a sentence for people."""

    reason: str
    message: str


def misfit(request: Request, fit: Fit, pool_tokens: int, now: float) -> Refusal | None:
    """The first thing that is wrong with the request; None: it fits. ``pool_tokens`` must find room in the pool."""
    blocks = fit.spec.blocks_for(pool_tokens)
    rules = (
        (
            request.fingerprint != fit.fingerprint,
            "invalid",
            "the request is for another model than the one served here",
        ),
        (
            not request.prompt_tokens or request.sampling.max_tokens < 1,
            "invalid",
            "a request needs at least one prompt token and must ask for at least one token",
        ),
        (
            request.prompt_tokens >= fit.context_tokens,
            "too_large",
            f"the prompt has {request.prompt_tokens} tokens, the context takes {fit.context_tokens - 1} and one more",
        ),
        (
            blocks > fit.pool_blocks,
            "too_large",
            f"the prompt needs {blocks} blocks, the pool of this pod has {fit.pool_blocks}",
        ),
        (
            request.deadline is not None and request.deadline <= now,
            "deadline",
            "the deadline passed before the request began",
        ),
    )
    return next((Refusal(reason, message) for is_broken, reason, message in rules if is_broken), None)
