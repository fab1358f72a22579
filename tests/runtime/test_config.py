"""Flags and variables become a config, or one sentence that says what to mend."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import pytest

from kvoy.core.errors import ConfigError
from kvoy.runtime.config import check_environ, load, option, parse, parse_size, usage


class Level(StrEnum):
    LOW = "low"
    HIGH = "high"


@dataclass(frozen=True, slots=True)
class Sample:
    """A config with a field of every kind."""

    listen: str = option("127.0.0.1:0", "Where to listen.")
    chunk_tokens: int = option(512, "Tokens in a prefill step.")
    lease_s: float = option(30.0, "Seconds.", at_least=0.5)
    single: bool = option(False, "One pod for everything.")
    level: Level = option(Level.LOW, "How much.")
    dtype: Literal["fp32", "bf16"] = option("bf16", "Number format.")
    pool_bytes: int = option(1 << 30, "Memory of the pool.")
    ways: tuple[Literal["tcp", "shm"], ...] = option(("tcp",), "Which ways, the best first.")

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"--chunk-tokens is {self.chunk_tokens}, but a chunk has at least 1 token.")


def sentence(argv=(), environ=None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(Sample, list(argv), environ or {})
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_stand_when_nothing_is_said():
    assert parse(Sample, [], {}) == Sample()


def test_every_kind_is_read_from_flags_with_or_without_equals_sign():
    argv = ["--listen=[::1]:0", "--chunk-tokens", "64", "--lease-s=1.5", "--single", "--level", "high"]
    config = parse(Sample, [*argv, "--dtype=fp32", "--pool-bytes", "512MiB"], {})
    assert config == Sample("[::1]:0", 64, 1.5, True, Level.HIGH, "fp32", 512 << 20)


def test_every_kind_is_read_from_the_environment():
    environ = {
        "KVOY_CHUNK_TOKENS": "7",
        "KVOY_LEASE_S": "2",
        "KVOY_SINGLE": "yes",
        "KVOY_LEVEL": "high",
        "PATH": "/bin",
    }
    assert parse(Sample, [], environ) == Sample(chunk_tokens=7, lease_s=2.0, single=True, level=Level.HIGH)


def test_a_flag_beats_the_environment_and_the_last_flag_beats_the_first():
    assert parse(Sample, ["--chunk-tokens=2", "--chunk-tokens=3"], {"KVOY_CHUNK_TOKENS": "1"}).chunk_tokens == 3


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--single"], True),
        (["--single", "false"], False),
        (["--single=off"], False),
        (["--no-single"], False),
        (["--single", "--chunk-tokens=1"], True),
    ],
)
def test_a_switch_may_stand_alone_or_carry_a_value(argv, value):
    assert parse(Sample, argv, {"KVOY_SINGLE": "true"} if not value else {}).single is value


def test_an_empty_value_is_a_value():
    assert parse(Sample, ["--listen", ""], {}).listen == ""
    assert parse(Sample, ["--listen="], {}).listen == ""


@pytest.mark.parametrize(
    ("text", "ways"), [("shm", ("shm",)), ("shm,tcp", ("shm", "tcp")), (" tcp , shm ", ("tcp", "shm"))]
)
def test_a_list_has_commas_and_keeps_its_order(text, ways):
    assert parse(Sample, ["--ways", text], {}).ways == ways
    assert parse(Sample, [], {"KVOY_WAYS": text}).ways == ways


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tcp,rdma", "'rdma' is none of tcp, shm"),
        ("tcp,", "'' is none of tcp, shm"),
        ("", "'' is none of tcp, shm"),
        ("tcp,shm,tcp", "tcp is in it more than once"),
        ("Tcp", "'Tcp' is none of tcp, shm"),
    ],
)
def test_a_list_names_each_of_what_there_is_once(text, told):
    assert sentence([f"--ways={text}"]) == f"--ways is {text!r}, but {told}."
    assert sentence(environ={"KVOY_WAYS": text}) == f"KVOY_WAYS is {text!r}, but {told}."


def test_unknown_names_are_errors_with_a_suggestion():
    assert "--chunk-token is not known here; did you mean --chunk-tokens?" in sentence(["--chunk-token=3"])
    assert "--help lists" in sentence(["--zzzzzz"])
    assert "KVOY_CHUNK_TOKEN is not known here; did you mean KVOY_CHUNK_TOKENS?" in sentence(
        environ={"KVOY_CHUNK_TOKEN": "3"}
    )
    assert "--no-listen" in sentence(["--no-listen"])
    assert "'stray'" in sentence(["stray"])


def test_variables_of_other_parts_and_of_kubernetes_pass():
    environ = {
        "KVOY_CACHE": "/x",
        "KVOY_ROUTER_SERVICE_HOST": "10.0.0.1",
        "KVOY_ROUTER_SERVICE_PORT_HTTP": "8000",
        "KVOY_ROUTER_PORT": "tcp://10.0.0.1:8000",
        "KVOY_ROUTER_PORT_8000_TCP_ADDR": "10.0.0.1",
        "KVOY_PORT": "tcp://10.0.0.1:8000",
    }
    assert parse(Sample, [], environ) == Sample()
    assert "KVOY_PORT" in sentence(environ={"KVOY_PORT": "8000"})


@pytest.mark.parametrize(
    ("flag", "wanted"),
    [
        ("--chunk-tokens=many", "a whole number"),
        ("--chunk-tokens=1.5", "a whole number"),
        ("--lease-s=soon", "a number"),
        ("--lease-s=nan", "a number"),
        ("--lease-s=inf", "a number"),
        ("--single=perhaps", "true|false"),
        ("--level=medium", "low|high"),
        ("--dtype=fp8", "fp32|bf16"),
        ("--pool-bytes=1.5", "bytes"),
        ("--pool-bytes=-1GiB", "bytes"),
        ("--pool-bytes=1XB", "bytes"),
    ],
)
def test_a_value_of_the_wrong_kind_says_what_is_wanted(flag, wanted):
    name, text = flag.split("=")
    message = sentence([flag])
    assert name in message
    assert repr(text) in message
    assert wanted in message


def test_a_number_may_have_a_least_value():
    assert parse(Sample, ["--lease-s=0.5"], {}).lease_s == 0.5
    assert sentence(["--lease-s=0.4"]) == "--lease-s is '0.4', but it must be at least 0.5."
    assert sentence(environ={"KVOY_LEASE_S": "-1"}) == "KVOY_LEASE_S is '-1', but it must be at least 0.5."


def test_a_flag_without_its_value_is_an_error():
    assert "--listen needs a value" in sentence(["--listen"])
    assert "--listen needs a value" in sentence(["--listen", "--single"])


def test_the_config_checks_itself():
    assert sentence(["--chunk-tokens=0"]) == "--chunk-tokens is 0, but a chunk has at least 1 token."
    assert "KVOY_CHUNK_TOKENS is 'x'" in sentence(environ={"KVOY_CHUNK_TOKENS": "x"})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1KiB", 1024),
        ("1GiB", 1 << 30),
        ("1.5 GiB", 3 << 29),
        ("2Gi", 2 << 30),
        ("2GB", 2 * 10**9),
        ("3m", 3 * 10**6),
        ("7B", 7),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


def test_a_field_without_a_default_must_be_given():
    @dataclass(frozen=True, slots=True)
    class Needy:
        """Needs a name."""

        name: str

    assert parse(Needy, ["--name=x"], {}).name == "x"
    with pytest.raises(ConfigError, match="--name has no default"):
        parse(Needy, [], {})


def test_a_field_that_flags_cannot_carry_is_a_bug_found_at_once():
    @dataclass(frozen=True, slots=True)
    class Odd:
        """Has a list."""

        words: list = option(None, "Words.")

    with pytest.raises(TypeError, match="words"):
        usage(Odd, "odd")


def test_help_shows_every_field_and_leaves(capsys):
    with pytest.raises(SystemExit) as left:
        load(Sample, ["--help"], {}, "sample")
    shown = capsys.readouterr().out
    assert left.value.code == 0
    for word in (
        "usage: sample",
        "--pool-bytes",
        "KVOY_LEASE_S",
        "Tokens in a prefill step.",
        "default low",
        "fp32|bf16",
    ):
        assert word in shown


def test_print_config_is_json_of_what_would_run(capsys):
    with pytest.raises(SystemExit) as left:
        load(Sample, ["--print-config", "--level=high"], {"KVOY_SINGLE": "1"}, "sample")
    assert left.value.code == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["level"], shown["single"], shown["pool_bytes"]) == ("high", True, 1 << 30)


def test_a_mistake_is_one_sentence_on_standard_error_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as left:
        load(Sample, ["--level=loud"], {}, "sample")
    out, err = capsys.readouterr()
    assert left.value.code == 2
    assert out == ""
    assert err == "sample: --level is 'loud', but it must be low|high.\n"


def test_a_program_with_options_of_its_own_can_check_the_environment():
    check_environ(["KVOY_MINE"], {"KVOY_MINE": "1", "KVOY_GRPC": "x:1"})
    with pytest.raises(ConfigError, match="did you mean KVOY_MINE"):
        check_environ(["KVOY_MINE"], {"KVOY_MIN": "1"})
