"""The only importer of grpc, nats, redis and kvoy.v1: everything that leaves the process goes through here.

The C core of grpc writes to standard error by itself unless told otherwise before its first import. What goes wrong
comes out of here as KvoyErrors, so it is told; who debugs grpc sets GRPC_VERBOSITY.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
