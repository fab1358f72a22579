"""Pods of different degree exchange exactly the heads that each of their ranks owns: real processes, over gloo."""

import multiprocessing

from tests.tensor_parallel import ranks


def test_every_rank_has_what_a_whole_pool_would_have_in_its_heads(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.tensor_parallel.ranks"])
    done = context.SimpleQueue()
    processes = [
        context.Process(target=ranks.run, args=(rank, str(tmp_path / "meeting"), done), daemon=True)
        for rank in range(2 * ranks.MOST)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
    counts = dict(done.get() for _ in processes)
    rounds = len(ranks.KV_HEADS) * 2 * len(ranks.DEGREES)
    taking_part = [sum(rank < degree for degree in ranks.DEGREES) * rounds for rank in range(ranks.MOST)]
    assert [counts[rank] for rank in range(2 * ranks.MOST)] == taking_part * 2
