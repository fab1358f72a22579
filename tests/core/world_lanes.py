"""What may happen next, waiting in lanes, and the time it is.

Each lane keeps its order, between lanes anything goes: an engine obeys in order, a stream delivers in order, and nobody
knows which of two comes first. Knows nothing of what happens. Golden transcripts and drawn episodes pick lanes by their
names and by the order in which they came to be: whoever changes either writes the transcripts anew.
"""

from collections import deque


class Lanes:
    def __init__(self):
        self.now = 1000.0
        self._waiting = {}
        """No lane of it is empty."""

    def later(self, name, act, *arguments):
        """Let ``act`` happen after all that waits in this lane."""
        self._waiting.setdefault(name, deque()).append((act, *arguments))

    def choices(self):
        """Lanes in which something may happen next."""
        return [*self._waiting]

    def do(self, name):
        """Let the next thing of this lane happen."""
        act, *arguments = self._waiting[name].popleft()
        if not self._waiting[name]:
            del self._waiting[name]
        self.now += 0.001
        act(*arguments)

    def drop(self, *names):
        """What waits in these lanes never happens."""
        for name in names:
            self._waiting.pop(name, None)

    def drop_starting(self, *prefixes):
        """What waits in lanes whose names start like this never happens."""
        self.drop(*[name for name in self._waiting if name.startswith(prefixes)])
