"""How much a router takes on at a time: a bound on requests and on prompt tokens in flight.

Owns the two counts. Must not know pods: whether they have room is theirs to say. What is admitted is given back exactly
once, with the ticket that was handed out.
"""

from dataclasses import dataclass

from kvoy.core.errors import InvariantError


@dataclass(frozen=True, slots=True)
class AdmissionParams:
    """Bounds; a single request larger than ``max_tokens`` is taken when nothing else is here."""

    max_requests: int = 1024
    max_tokens: int = 4_000_000
    """Prompt tokens of all requests in flight."""
    retry_after_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to be in flight."""

    number: int
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """No room. ``reason`` is machine-readable, ``message`` is for people."""

    reason: str
    message: str
    retry_after_s: float


class Admission:
    """The requests in flight of one router."""

    def __init__(self, params: AdmissionParams) -> None:
        self._params = params
        self._tickets: dict[int, Ticket] = {}
        self._issued = 0
        self.requests = 0
        self.tokens = 0

    def admit(self, requests: int, tokens: int) -> Ticket | Refusal:
        """Takes all of them or none. ``tokens`` counts their prompts."""
        params = self._params
        if self.requests + requests > params.max_requests:
            told = f"The router already has {self.requests} requests in flight, of {params.max_requests} at most."
            return Refusal("too_many_requests", f"{told} Try again in a moment.", params.retry_after_s)
        if self.requests and self.tokens + tokens > params.max_tokens:
            told = f"The router already has {self.tokens} prompt tokens in flight, of {params.max_tokens} at most."
            return Refusal("too_many_tokens", f"{told} Try again in a moment.", params.retry_after_s)
        self._issued += 1
        ticket = self._tickets[self._issued] = Ticket(self._issued, requests, tokens)
        self.requests += requests
        self.tokens += tokens
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Gives room back. Raises InvariantError for a ticket that was given back before."""
        if self._tickets.pop(ticket.number, None) != ticket:
            raise InvariantError(f"{ticket} is not in flight")
        self.requests -= ticket.requests
        self.tokens -= ticket.tokens

    def check(self) -> None:
        """Raises InvariantError unless the counts are the sums of the tickets."""
        tickets = self._tickets.values()
        sums = (sum(ticket.requests for ticket in tickets), sum(ticket.tokens for ticket in tickets))
        if sums != (self.requests, self.tokens):
            raise InvariantError(f"tickets add up to {sums}, counted are {(self.requests, self.tokens)}")
