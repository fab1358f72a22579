"""What torch can do on this machine, as one line of JSON: ``python -m kvoy.engine.probe``.

A program of its own because importing torch is slow, and fatal where it was built for another processor.
"""

import json
import sys

import torch

from kernels.cpu import compiles


def main() -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    sys.stdout.write(
        json.dumps(
            {
                "version": str(torch.__version__),
                "threads": torch.get_num_threads(),
                "cpu": capability,
                "bf16": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),  # noqa: SLF001  - there is no public one
                "cuda": torch.cuda.is_available(),
                "compiles": compiles(),
            }
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
