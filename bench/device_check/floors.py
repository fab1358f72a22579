"""The two ceilings that all else is a share of: copying in the device's memory, and products of bf16 matrices."""

import torch

from bench.device_check.bench import Bench
from bench.device_check.report import Report, Row, rate


def check(bench: Bench, report: Report) -> None:
    report.check("copy bandwidth", lambda: _copy(bench))
    report.check("bf16 matrix product", lambda: _product(bench))


def _copy(bench: Bench) -> Row:
    """Random bytes: zeros may be copied faster."""
    words = bench.sizes.of(1 << 28, 1 << 12)
    source = torch.randint(0, 1 << 30, (words,), dtype=torch.int32, device=bench.place)
    target = torch.empty_like(source)
    size_bytes = 2 * source.numel() * source.itemsize
    bench.copy_bytes_a_second = size_bytes / bench.seconds(lambda: target.copy_(source))
    return Row(f"copy of {size_bytes >> 21:,} MiB, read + written", rate(bench.copy_bytes_a_second))


def _product(bench: Bench) -> Row:
    size = bench.sizes.of(8192, 64)
    left, right = bench.normal(size, size), bench.normal(size, size)
    bench.bf16_flops_a_second = 2 * size**3 / bench.seconds(lambda: left @ right)
    return Row(f"bf16 product of {size} x {size} x {size}", f"{bench.bf16_flops_a_second / 1e12:,.1f} TFLOP/s")
