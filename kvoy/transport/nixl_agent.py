"""An agent of NIXL over UCX, and the one piece of memory that it knows: what kvoy uses of that library, and no more.

The library is an optional extra, loaded when the first agent is made. Whoever has an agent calls it from one thread.
"""

import atexit
import ctypes
import importlib
import logging
import mmap
import secrets
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kvoy.core.errors import ConfigError, PeerError

_DRAM = "DRAM"
_LEAVE_S = 1.0

is_leaving = threading.Event()
"""The process ends: threads with an agent return. One that the interpreter stops amid the library would abort it."""
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Agent:
    """Registers ``memory`` until ``close``, for reads by others and for its own reads into it."""

    def __init__(self, memory: mmap.mmap) -> None:
        """ConfigError where the package is missing or finds no network it can use."""
        library = _library()
        self._buffer: ctypes.c_char | None = ctypes.c_char.from_buffer(memory)
        self.address = ctypes.addressof(self._buffer)
        """Of the first byte."""
        try:
            # The library's own thread would poll without a pause: it takes a whole core of an idle pod.
            config = library.nixl_agent_config(backends=[], enable_prog_thread=False)
            self._agent: Any = library.nixl_agent(f"kvoy-{secrets.token_hex(8)}", config)
            self._agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
            self._registered = self._agent.register_memory([(self.address, len(memory), 0, "")], _DRAM)
            self.metadata = bytes(self._agent.get_agent_metadata())
            """What another agent must know to reach this one."""
        except Exception as error:  # the library's exceptions have no base of their own
            raise ConfigError(f"NIXL cannot be used here: {error or type(error).__name__}.") from error
        self._peers: list[str] = []

    def meet(self, metadata: bytes) -> str:
        """Another agent's name, for ``read``; PeerError if these bytes describe none."""
        try:
            peer = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise PeerError(f"it is no agent: {error or type(error).__name__}", "bad_source") from error
        name = peer.decode() if isinstance(peer, bytes) else str(peer)
        self._peers.append(name)
        return name

    def read(self, peer: str, there: int, here: int, nbytes: int) -> "Reading":
        """Begins to read from the address ``there`` of the peer to ``here`` in the memory."""
        try:
            ours = self._agent.get_xfer_descs([(here, nbytes, 0)], _DRAM)
            theirs = self._agent.get_xfer_descs([(there, nbytes, 0)], _DRAM)
            handle = self._agent.initialize_xfer("READ", ours, theirs, peer)
            return Reading(self._agent, handle, self._agent.transfer(handle))
        except Exception as error:
            raise PeerError(f"it cannot be read: {error or type(error).__name__}", "source_lost") from error

    def progress(self) -> None:
        """Where the network does not read memory by itself, this does it, a step at a time, for the others."""
        self._agent.get_new_notifs()  # makes progress as its side effect; what others say is not listened to

    def close(self) -> None:
        """Once, when no reading is under way: NIXL promises nothing about memory that is taken from one."""
        for peer in self._peers:
            _quietly(self._agent.remove_remote_agent, peer)
        _quietly(self._agent.deregister_memory, self._registered)
        self._agent = self._registered = self._buffer = None

    def abandon(self) -> None:
        """Instead of ``close`` where a reading is under way and the process ends: it is never freed."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


class Reading:
    """Bytes on their way."""

    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state

    def is_over(self) -> bool:
        """True: all bytes are there. PeerError: they will not come. To be asked until it is either."""
        if self._state == "PROC":
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except Exception as error:  # noqa: BLE001 - see Agent
                self._state = f"ERR: {error or type(error).__name__}"
        if self._state == "PROC":
            return False
        if self._handle is not None:
            _quietly(self._handle.release)
            self._handle = None
        if self._state != "DONE":
            raise PeerError(f"a read ended as {self._state}", "source_lost")
        return True


def start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """A thread for an agent. One that hangs in the library does not keep the process."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    _threads.add(thread)
    return thread


@atexit.register
def _leave() -> None:
    is_leaving.set()
    for thread in list(_threads):
        thread.join(_LEAVE_S)


def _library() -> ModuleType:
    try:
        library = importlib.import_module("nixl_cu12")
    except ImportError as error:
        raise ConfigError("Transport nixl needs the extra nixl: pip install 'kvoy[nixl]'.") from error
    log = logging.getLogger("nixl")
    log.handlers.clear()  # it prints to standard output, which is the pod's own
    log.propagate = True
    log.setLevel(logging.WARNING)
    return library


def _quietly(call: Any, *arguments: object) -> None:
    try:
        call(*arguments)
    except Exception as error:  # noqa: BLE001 - see Agent
        logging.getLogger(__name__).debug("NIXL does not let go of something: %s", error)
