"""The port of device.py on an NVIDIA GPU: streams, pinned memory, CUDA graphs, which only this file asks torch for.

Rules of capture, which whoever writes code that is captured must keep: nothing waits for the device, nothing copies
from the host, every kernel has run before (loading one is not allowed amid a capture), and results are read before
the next replay, for all graphs take their memory from one pool.
"""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import torch
from torch import Tensor

from kvoy.engine.device import HostMemory, Lane, Mark


class CudaLane:
    """A stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return Mark(event)

    def follow(self, mark: Mark) -> None:
        if mark.event is not None:
            self._stream.wait_event(mark.event)

    def use(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)


class CudaDevice:
    """torch's current GPU. Everything computes in one stream, the current one; copies have a second."""

    def __init__(self) -> None:
        self.place = torch.device("cuda", torch.cuda.current_device())
        self.compute: Lane = CudaLane(torch.cuda.current_stream())
        self.copy: Lane = CudaLane(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        self._capture_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graph_memory = torch.cuda.graph_pool_handle()

    def host_memory(self, size_bytes: int) -> HostMemory:
        tensor = torch.empty((max(size_bytes, 1),), dtype=torch.uint8, pin_memory=True)
        # torch shows a tensor's memory through numpy only, which the device check does without.
        window = (ctypes.c_ubyte * tensor.shape[0]).from_address(tensor.data_ptr())
        return HostMemory(tensor[:size_bytes], memoryview(window).cast("B")[:size_bytes])

    def host_copy(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def pin(self, memory: Tensor) -> bool:
        if memory.is_pinned():
            return True
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        refused = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if refused:
            with suppress(RuntimeError):  # the refusal is reported once more, by whatever asks next
                torch.zeros((1,), device=self.place).add_(1)
        return not refused

    def capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Runs once outside, where kernels are compiled and loaded and the matrix library takes its workspace for the
        stream; the capture then only records. An order of sizes that begins with the largest shares memory best."""
        current = torch.cuda.current_stream()
        self._capture_stream.wait_stream(current)
        with torch.cuda.stream(self._capture_stream):
            run()
        current.wait_stream(self._capture_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory, stream=self._capture_stream):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def free_bytes(self) -> int | None:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.place)[0]
