"""How the C library of this process treats memory that is freed and will be needed again in a moment.

gRPC takes and frees some MiB for every frame. By default glibc gives such memory back to the kernel each time, which
then hands it out again page by page, zeroed: 200,000 page faults for 1.5 GB of frames, 20,000 where it is kept. For the
process's main module to call.
"""

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""As <malloc.h> numbers them."""
_KEPT_BYTES = 128 << 20
_GROWTH_BYTES = 32 << 20
_LARGEST_BYTES = 32 << 20
"""More than any message; glibc takes no more."""


def keep_freed_memory() -> bool:
    """Keep up to some 128 MiB of what is freed for what comes next. False where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_THRESHOLD, _LARGEST_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES), (_TOP_PAD, _GROWTH_BYTES))
    return all(mallopt(name, value) for name, value in settings)
