"""Measurements that hold kvoy to its numbers, one program a question: ``python -m bench.engine`` and so on.

Not shipped. Each prints one table, writes ``bench/results/NAME.json`` and, with ``--check``, exits 1 when a target is
missed. ``report``, ``machine``, ``load`` and ``stats`` are shared by all; ``peers`` knows the programs that kvoy is
compared with.
"""
