"""What a router does, whatever the surface: answer calls, tokenise, tell models and whether it can serve.

Owns admission and the flights' beginnings and ends. gRPC and HTTP are thin faces of this.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from kvoy.core.admission import Admission, AdmissionParams, Refusal, Ticket
from kvoy.core.errors import InvalidRequest, NotFound, Overloaded, Unavailable
from kvoy.core.generate import GenerateCall, TokenizeCall
from kvoy.core.request import RequestParams
from kvoy.core.types import ModelInfo, PodLoad, Role
from kvoy.telemetry.metrics import Metrics
from services.router.answers import Answers, Mailbox, Slot
from services.router.fleet import Fleet
from services.router.flight import Flight
from services.router.metrics import record
from services.router.resolve import Resolved, another, check_model, resolve
from services.router.served import Served


@dataclass(frozen=True, slots=True)
class RouterParams:
    """Limits of one router."""

    admission: AdmissionParams
    patience: RequestParams


class Router:
    """One router. ``open`` refuses by raising; what it returns holds nothing until it is entered."""

    def __init__(self, served: Served, fleet: Fleet, metrics: Metrics, params: RouterParams) -> None:
        self.served = served
        self.fleet = fleet
        self.metrics = metrics
        self.draining = False
        self._admission = Admission(params.admission)
        self._patience = params.patience
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.watch("kvoy_router_requests_in_flight", lambda: self._admission.requests)
        metrics.watch("kvoy_router_prompt_tokens_in_flight", lambda: self._admission.tokens)
        metrics.watch("kvoy_router_prefix_index_entries", lambda: len(fleet.index))
        for role in (Role.DECODE, Role.PREFILL):
            metrics.watch("kvoy_router_usable_pods", partial(fleet.usable_pods, role), role=role.value)

    @property
    def load(self) -> PodLoad:
        return PodLoad(requests_running=self._admission.requests, tokens_waiting=self._admission.tokens)

    @property
    def model(self) -> ModelInfo:
        """With the context that the pods have room for."""
        info = self.served.info
        return ModelInfo(info.name, info.fingerprint, self.fleet.context_tokens, info.vocab_tokens)

    async def open(
        self,
        calls: Sequence[GenerateCall],
        choices: int = 1,
        *,
        default_max_tokens: int | None = None,
        whole: bool = False,
    ) -> Answers:
        """``choices`` answers to each of ``calls`` (which have passed kvoy.core.generate.check), all or none of them,
        in order. ``whole``: answers are read only when they are complete. Raises InvalidRequest, NotFound, Overloaded
        or Unavailable."""
        now = self.fleet.clock()
        if self.draining:
            raise Unavailable("This router is about to leave and takes nothing new; try again.", "draining")
        context_tokens = self.fleet.context_tokens
        once = [await resolve(call, self.served, context_tokens, now, default_max_tokens) for call in calls]
        resolved = [another(one, choice) for one in once for choice in range(choices)]
        ticket = self._admit(resolved)
        mailbox = Mailbox(whole=whole)
        flights = [
            Flight(
                one,
                self.fleet,
                patience=self._patience,
                detokenizer=self.served.tokenizer.detokenizer(continuing=not one.is_chat),
                reader=Slot(mailbox, index),
                landed=partial(record, self.metrics),
            )
            for index, one in enumerate(resolved)
        ]
        return Answers(mailbox, flights, lambda: self._release(ticket))

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts a call that is refused inside, before any pod is asked."""
        try:
            yield
        except InvalidRequest:
            self.metrics.count("kvoy_router_refused_calls", reason="invalid")
            raise
        except NotFound:
            self.metrics.count("kvoy_router_refused_calls", reason="not_found")
            raise
        except (Overloaded, Unavailable) as error:
            self.metrics.count("kvoy_router_refused_calls", reason=error.reason)
            raise

    async def tokenize(self, call: TokenizeCall) -> tuple[int, ...]:
        check_model(call.model, self.served)
        return await self.served.token_ids(call.prompt)

    async def drain(self) -> None:
        """Takes nothing new; returns when every answer has ended."""
        self.draining = True
        await self._idle.wait()

    def _admit(self, resolved: Sequence[Resolved]) -> Ticket:
        answer = self._admission.admit(len(resolved), sum(one.request.prompt_tokens for one in resolved))
        if isinstance(answer, Refusal):
            raise Overloaded(answer.message, answer.reason, answer.retry_after_s)
        self._idle.clear()
        return answer

    def _release(self, ticket: Ticket) -> None:
        self._admission.release(ticket)
        if not self._admission.requests:
            self._idle.set()
