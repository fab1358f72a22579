"""How long a decode pod keeps blocks for a request whose KV has not come: its lease, and what makes it begin anew.

While no handoff is open the router keeps the lease alive, since the prompt may wait long for a prefill pod; while one
is open, what comes on it does. A prefill pod or router that is gone is seen by its broken stream at once: a lease
only bounds one that hangs.
"""

from itertools import count

from kvoy.core.deadlines import Deadlines
from kvoy.core.decode_request import DecodeRequest, Phase


class Leases:
    """Owner: DecodeBrain. ``lease_s`` without a word of the router, ``silence_s`` with an open, silent handoff."""

    def __init__(self, lease_s: float, silence_s: float) -> None:
        self._lease_s = lease_s
        self._silence_s = silence_s
        self._numbers = count(1)
        self._ends: Deadlines[str] = Deadlines()

    @property
    def next_end(self) -> float | None:
        """When the first of all leases ends."""
        return self._ends.next

    def grant(self, request: DecodeRequest, now: float) -> str:
        """A new lease for a request that has just been reserved, or got a new epoch; the one before it is void."""
        request.lease = f"lease-{next(self._numbers)}"
        self.extend(request, now)
        return request.lease

    def extend(self, request: DecodeRequest, now: float) -> None:
        """Its handoff opened, brought something, lost its stream, or ended."""
        if request.phase is Phase.RESERVED and not request.is_renewing:
            lease_s = self._silence_s if request.is_receiving else self._lease_s
            self._ends.set(request.request_id, now + lease_s)

    def keep(self, request: DecodeRequest, now: float) -> None:
        """Its router lives and wants it. An open handoff has to keep itself."""
        if not request.is_receiving:
            self.extend(request, now)

    def end(self, request_id: str) -> None:
        """Nothing is awaited any more; harmless when nothing was."""
        self._ends.drop(request_id)

    def pop_ended(self, now: float) -> str | None:
        """A request whose lease has run out; None if there is no other."""
        return self._ends.pop_due(now)
