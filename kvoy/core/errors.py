"""The one tree of errors.

Expected refusals are results, not exceptions. What is raised is either a person's mistake
(InvalidRequest and its kin: the message is one sentence that says what is wrong and what to do),
a peer's failure (PeerError, raised in kvoy.transport), or a bug (InvariantError).
"""


class KvoyError(Exception):
    """Base of every error that kvoy raises on purpose."""


class InvalidRequest(KvoyError):
    """A request that no retry can make right.

    ``param`` names the field at fault, as the caller spelled it, or is None. ``reason`` is machine-readable
    (``too_large``, say) or empty.
    """

    def __init__(self, message: str, param: str | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.param = param
        self.reason = reason


class NotFound(KvoyError):
    """A name (of a model, say) that does not exist here."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Overloaded(KvoyError):
    """Refused for want of room; the same request may be taken after ``retry_after_s`` seconds."""

    def __init__(self, message: str, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Unavailable(KvoyError):
    """No pod can take the request now, or the one that had it is lost.

    ``reason`` is machine-readable (``draining``, say) or empty.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class DeadlinePassed(KvoyError):
    """The time that the caller gave is over."""


class ConfigError(KvoyError):
    """A setting, file or environment that must be mended before kvoy can run."""


class ModelError(ConfigError):
    """A model that cannot be found, read or run."""


class PeerError(KvoyError):
    """Another process answered with a failure or not at all.

    ``reason`` is machine-readable (``decode_lost``, say) or empty.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class EngineError(KvoyError):
    """The engine worker is gone or reported a failure."""


class InvariantError(KvoyError):
    """A bug: a state that must not be. Caught only at the border of a task."""
