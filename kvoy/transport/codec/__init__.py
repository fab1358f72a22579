"""The only translator between kvoy.v1 messages and the dataclasses of kvoy.core. One module for each proto file.

``x_to_proto`` never fails on a value that kvoy.core allows; ``x_from_proto`` trusts nothing and raises InvalidRequest,
naming the field. A field added in proto/ or in kvoy.core is added here; tests/transport/test_codec.py goes both ways.
"""
