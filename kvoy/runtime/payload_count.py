"""Which transport how much KV went by, as both ends of handoffs count it."""

from kvoy.core.wire import TRANSPORTS
from kvoy.telemetry.metrics import Instrument, Kind, Metrics


def payload_table(role: str, verb: str, about: str) -> tuple[Instrument, Instrument]:
    """What a PayloadCount counts; ``about`` says in a sentence which frames these are."""
    series = tuple((transport,) for transport in TRANSPORTS)
    frames, payload = _names(role, verb)
    return (
        Instrument(frames, Kind.COUNTER, f"Frames {about}", "{frame}", ("transport",), series),
        Instrument(payload, Kind.COUNTER, f"Bytes of KV in frames {about}", "By", ("transport",), series),
    )


class PayloadCount:
    """Of frames that a pod has ``sent`` or ``received``: the verb of its ``payload_table``."""

    def __init__(self, metrics: Metrics, role: str, verb: str) -> None:
        self._metrics = metrics
        self._names = _names(role, verb)

    def add(self, transport: str, nbytes: int) -> None:
        """A frame with a payload so long."""
        frames, payload = self._names
        self._metrics.count(frames, transport=transport)
        self._metrics.count(payload, nbytes, transport=transport)


def _names(role: str, verb: str) -> tuple[str, str]:
    return f"kvoy_{role}_frames_{verb}", f"kvoy_{role}_{verb}_bytes"
