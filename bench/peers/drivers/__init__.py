"""One program an engine: each loads the model, then obeys orders on standard input until that closes.

These files run in the environments of the peers, where neither kvoy nor anything else of this repository can be
imported; only ``protocol`` is common to them.
"""
