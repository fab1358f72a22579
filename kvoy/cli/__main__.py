"""``python -m kvoy.cli``: the same as ``kvoy``."""

from kvoy.cli import main

main()
