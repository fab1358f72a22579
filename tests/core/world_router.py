"""A toy router and its clients: what became of each request and of the works that were placed for it.

It places a work on the prefill pod once the decode pod has reserved, asks for a new epoch when the newest work fails,
and gives up after ``max_renewals``. Knows of the pods only what they tell it.
"""

from dataclasses import dataclass, field

from kvoy.core import actions as do
from kvoy.core import events as ev
from kvoy.core.frames import HandoffKey
from kvoy.core.types import FinishReason, PrefillWork
from tests.core.toy import continuation


@dataclass(eq=False)
class Client:
    """What the router knows of one request."""

    request: object
    is_local: bool
    renewals: int = 0
    tokens: tuple[int, ...] = ()
    ends: list = field(default_factory=list)
    works: dict[HandoffKey, list] = field(default_factory=dict)

    @property
    def is_over(self):
        return bool(self.ends)

    @property
    def open_works(self):
        """Works about which the last word was not said."""
        return [key for key, words in self.works.items() if all(isinstance(word, do.WorkStarted) for word in words)]


class Router:
    def __init__(self, lanes, p, d, context_tokens, max_renewals):
        self.clients = {}
        self._lanes, self._p, self._d = lanes, p, d
        self._context_tokens = context_tokens
        self._max_renewals = max_renewals

    def ask(self, request, is_local):
        assert request.request_id not in self.clients or self.clients[request.request_id].is_over
        self.clients[request.request_id] = Client(request, is_local)
        self._tell_d(ev.ReserveAsked(request, is_local, "router"))

    def cancel(self, request_id):
        self._tell_d(ev.RequestCancelled(request_id))
        self.cancel_work(request_id)

    def cancel_work(self, request_id):
        for key in self.clients[request_id].works:
            self._tell_p(ev.WorkCancelled(key))

    def renew(self, request_id):
        self._tell_d(ev.RenewAsked(request_id))

    def lose_works(self):
        """The prefill pod is killed."""
        lost = [key for client in self.clients.values() for key in client.open_works]
        for key in lost:
            self.hear_work(key, do.WorkFailed(key, "lost", "the pod was killed"))

    def assert_clean(self):
        for client in self.clients.values():
            self._assert_ended(client)

    # what pods say

    def hear_reservation(self, reservation):
        self._lanes.later("router", self._place, reservation)

    def hear_rejection(self, request_id, reason):
        self._end(self.clients[request_id], reason)

    def hear_output(self, output):
        client = self.clients[output.request_id]
        assert not client.is_over
        client.tokens += output.token_ids
        assert (output.finish is None) == (output.report is None)
        if output.finish is not None:
            client.report = output.report
            self._end(client, output.finish)

    def hear_work(self, key, word):
        client = next(client for client in self.clients.values() if key in client.works)
        client.works[key].append(word)
        is_newest = key.epoch == max(known.epoch for known in client.works)
        if isinstance(word, do.WorkFailed) and is_newest and not client.is_over:
            client.renewals += 1
            is_last = client.renewals > self._max_renewals
            self._tell_d(ev.RequestCancelled(key.request_id) if is_last else ev.RenewAsked(key.request_id))

    def _place(self, reservation):
        client = self.clients[reservation.request_id]
        if client.is_over or client.is_local:
            return
        key = HandoffKey(reservation.request_id, reservation.epoch)
        client.works[key] = []
        self._p.tell(ev.WorkSubmitted(PrefillWork(client.request, reservation)))

    def _end(self, client, end):
        client.ends.append(end)
        if end in {FinishReason.STOP, FinishReason.LENGTH}:
            return
        for key in client.open_works:
            self._tell_p(ev.WorkCancelled(key))

    def _assert_ended(self, client):
        assert len(client.ends) == 1, f"{client.request.request_id} ended with {client.ends}"
        expected = continuation(client.request.token_ids, client.request.sampling, self._context_tokens)
        if client.ends[0] in {FinishReason.STOP, FinishReason.LENGTH}:
            assert client.tokens == expected
        else:
            assert client.tokens == expected[: len(client.tokens)]
        for words in client.works.values():
            assert sum(not isinstance(word, do.WorkStarted) for word in words) == 1

    def _tell_p(self, event):
        self._lanes.later("router", self._p.tell, event)

    def _tell_d(self, event):
        self._lanes.later("router", self._d.tell, event)
