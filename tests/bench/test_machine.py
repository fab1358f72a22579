"""Whose processor time it was, and which processor."""

from bench import machine
from bench.load import CpuTimes, foreign_share

BARE_NAME = """processor\t: 0
model name\t: Some(R) Processor
cpu family\t: 6
model\t\t: 167
flags\t\t: fpu avx2 avx512_bf16 amx_bf16 lm

processor\t: 1
model name\t: another
"""


def test_what_is_neither_idle_nor_ours_is_foreign():
    before = CpuTimes(total=100.0, busy=40.0, own=10.0)
    assert foreign_share(before, CpuTimes(total=110.0, busy=49.0, own=17.0)) == 0.2
    assert foreign_share(before, before) == 0.0
    # The two counters tick apart: a little less than nothing is nothing.
    assert foreign_share(before, CpuTimes(total=110.0, busy=44.0, own=14.5)) == 0.0


def test_the_processor_is_told_by_name_numbers_and_what_it_can_do(tmp_path):
    (tmp_path / "cpuinfo").write_text(BARE_NAME)
    name, flags = machine._processor(tmp_path / "cpuinfo")
    assert name == "Some(R) Processor (family 6, model 167)"
    assert flags == ("avx2", "avx512_bf16", "amx_bf16")


def test_without_proc_there_is_a_name_all_the_same(tmp_path):
    name, flags = machine._processor(tmp_path / "none")
    assert name
    assert flags == ()


def test_this_machine_has_cores_memory_and_the_versions_given():
    found = machine.this_machine(vllm="1.2.3")
    assert found.cores == len(machine.usable_cores()) > 0
    assert found.memory_bytes > 0
    assert {"kvoy", "torch", "vllm"} <= found.versions.keys()
