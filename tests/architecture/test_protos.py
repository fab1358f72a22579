"""Each RPC has a request and a response of its own, so that one can grow without the other; services are documented."""

import importlib
from collections import Counter

import pytest

from tests.architecture.sources import ROOT

FILES = sorted((ROOT / "proto" / "kvoy" / "v1").glob("*.proto"))


def services():
    for path in FILES:
        module = importlib.import_module(f"kvoy.v1.{path.stem}_pb2")
        yield from module.DESCRIPTOR.services_by_name.values()


METHODS = [method for service in services() for method in service.methods]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name)
def test_an_rpc_names_its_messages_after_itself(method):
    assert method.input_type.name == f"{method.name}Request"
    assert method.output_type.name == f"{method.name}Response"


def test_no_message_serves_two_rpcs():
    used = Counter(message.full_name for method in METHODS for message in (method.input_type, method.output_type))
    assert [message for message, times in used.items() if times > 1] == []


def test_every_enum_starts_unspecified():
    for path in FILES:
        module = importlib.import_module(f"kvoy.v1.{path.stem}_pb2")
        for enum in module.DESCRIPTOR.enum_types_by_name.values():
            assert enum.values[0].number == 0
            assert enum.values[0].name.endswith("_UNSPECIFIED")
