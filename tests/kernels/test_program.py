"""Programs: every op sees all of what the ones before it did, on any number of threads, as often as it is run."""

import pytest
import torch

from kernels import jit
from kernels.cpu import Call, words
from kernels.program import Program

ITEMS = 64


def _add_what_the_other_half_has(given):
    """out[i] = x[ITEMS - 1 - i] + 1: an item needs one that another thread may have written."""
    x, out = jit.fp32s(given[1], ITEMS), jit.fp32s(given[2], ITEMS)
    item = jit.next_item(given)
    while item < ITEMS:
        out[item] = x[ITEMS - 1 - item] + 1
        item = jit.next_item(given)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_ops_follow_each_other_on_all_threads(threads):
    op = jit.op(_add_what_the_other_half_has)
    memory = torch.zeros(2, ITEMS)
    places = [memory[0].data_ptr(), memory[1].data_ptr()]
    program = Program([Call(op, words(0, places[i % 2], places[(i + 1) % 2]), alone=False) for i in range(400)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for turn in range(20):
        memory[0] = torch.arange(ITEMS) + turn
        program.run()
        assert torch.equal(memory[0], torch.arange(ITEMS) + turn + 400.0)
    torch.set_num_threads(before)


def test_a_program_of_nothing_does_nothing():
    Program([]).run()
