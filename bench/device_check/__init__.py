"""What one GPU does with our kernels and our model runner, in one short run: ``python -m bench.device_check``.

For a machine that has Python, torch and triton and nothing else, from a copy of the tree: nothing here may import more
(tests/bench/test_device_check.py). First whether every op is right, then how far each is from the floor that the run
itself measures, then the runner with a model's shape and random weights.
"""
