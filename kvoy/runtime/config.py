"""Turns flags and environment variables into one frozen dataclass.

A field ``lease_s`` is the flag ``--lease-s`` and the variable ``KVOY_LEASE_S``; flags win. Unknown names are errors, in
both places, so that a typing mistake never goes unnoticed. Knows nothing of what the fields mean: a dataclass checks
itself in ``__post_init__`` by raising ValueError. The environment is read here and nowhere else in a service.
"""

import difflib
import json
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from enum import Enum
from typing import Any, Literal, NoReturn, TypeVar

from kvoy.core.errors import ConfigError

T = TypeVar("T")

SHARED_VARIABLES: Mapping[str, str] = {
    "KVOY_CACHE": "folder of downloaded and converted models",
    "KVOY_GRPC": "host:port of the router that `kvoy generate`, `chat` and `pods` talk to",
}
"""Variables that other parts of kvoy read; a service lets them pass."""

_SERVICE_LINK = re.compile(
    r"KVOY(_[A-Z0-9]+)*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)"
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_EXPONENT = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def option(default: T, help: str, *, at_least: float | None = None) -> T:  # noqa: A002  - the usual word for it
    """A config field with its default, the sentence that ``--help`` shows, and the smallest number it may be given."""
    return field(default=default, metadata={"help": help, "at_least": at_least})


def load(cls: type[T], argv: Sequence[str], environ: Mapping[str, str], prog: str) -> T:
    """The config of a program. On ``--help``, ``--print-config`` or a mistake it exits instead (0, 0, 2)."""
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(usage(cls, prog))
        raise SystemExit(0)
    try:
        config = parse(cls, [arg for arg in argv if arg != "--print-config"], environ)
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        raise SystemExit(2) from None
    if "--print-config" in argv:
        sys.stdout.write(to_json(config) + "\n")
        raise SystemExit(0)
    return config


def parse(cls: type[T], argv: Sequence[str], environ: Mapping[str, str]) -> T:
    """Reads flags over environment over defaults. Raises ConfigError with one sentence."""
    readers = {option.name: option for option in _options(cls)}
    values = _from_environ(readers, environ) | _from_flags(readers, argv)
    missing = [option.flag for option in readers.values() if option.required and option.name not in values]
    if missing:
        raise ConfigError(f"{missing[0]} has no default and must be given.")
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def to_json(config: Any) -> str:
    """The config as ``--print-config`` shows it."""
    return json.dumps(
        asdict(config), indent=2, default=lambda value: value.value if isinstance(value, Enum) else str(value)
    )


def check_environ(known: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raises ConfigError for a KVOY_ variable that is neither in ``known`` nor shared."""
    allowed = [*known, *SHARED_VARIABLES]
    for name, value in environ.items():
        if name.startswith("KVOY_") and name not in allowed and not _is_service_link(name, value):
            raise ConfigError(f"The environment variable {name} is not known here{_suggestion(name, allowed)}")


@dataclass(frozen=True, slots=True)
class _Option:
    """One field, as flags and variables see it."""

    name: str
    kind: Any
    help: str
    default: Any
    required: bool
    at_least: float | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "KVOY_" + self.name.upper()

    @property
    def wants(self) -> str:
        """What a value looks like, for --help and for complaints."""
        choices = _choices(self.kind)
        if choices:
            return "|".join(choices) + (", or several with commas between" if self.is_list else "")
        if self.is_size:
            return "bytes, or 512MiB, 1.5GiB, 2GB"
        return {int: "a whole number", float: "a number", bool: "true|false", str: "text"}[self.kind]

    @property
    def is_size(self) -> bool:
        return self.kind is int and self.name.endswith("_bytes")

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.kind) is tuple

    def read(self, text: str, source: str) -> Any:
        """The value that ``text`` stands for; ``source`` is the flag or variable to name in a complaint."""
        try:
            value: Any = self._list(text, source) if self.is_list else self._reader()(text.strip())
        except (ValueError, KeyError, OverflowError):
            raise ConfigError(f"{source} is {text!r}, but it must be {self.wants}.") from None
        if self.at_least is not None and value < self.at_least:
            raise ConfigError(f"{source} is {text!r}, but it must be at least {self.at_least:g}.")
        return value

    def _list(self, text: str, source: str) -> tuple[str, ...]:
        """Different choices in the order given."""
        values = tuple(word.strip() for word in text.split(","))
        choices = _choices(self.kind)
        for value in values:
            if value not in choices:
                raise ConfigError(f"{source} is {text!r}, but {value!r} is none of {', '.join(choices)}.")
            if values.count(value) > 1:
                raise ConfigError(f"{source} is {text!r}, but {value} is in it more than once.")
        return values

    def _reader(self) -> Callable[[str], Any]:
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            return lambda text: {member.value: member for member in self.kind}[text]
        if typing.get_origin(self.kind) is Literal:
            return lambda text: {choice: choice for choice in typing.get_args(self.kind)}[text]
        if self.is_size:
            return parse_size
        readers: dict[Any, Callable[[str], Any]] = {int: int, float: _finite, bool: _bool, str: str}
        return readers[self.kind]


def parse_size(text: str) -> int:
    """Bytes that ``1048576``, ``1MiB``, ``1.5GiB``, ``2GB`` or ``1Gi`` stand for; ValueError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size")
    number, letter, binary = match.groups()
    size = float(number) * (1024 if binary else 1000) ** _EXPONENT[letter.lower()]
    if (binary and not letter) or size != int(size):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(size)


def usage(cls: type[Any], prog: str) -> str:
    """The text of ``--help``, from the docs of the fields."""
    summary = (cls.__doc__ or "").strip()
    lines = [
        f"usage: {prog} [options]",
        "",
        summary,
        "",
        "Each option is also an environment variable; a flag wins.",
        "",
    ]
    for option in _options(cls):
        default = "required" if option.required else f"default {_shown(option.default)}"
        lines.append(f"  {option.flag} ({option.wants}; {default}) {option.variable}")
        lines += textwrap.wrap(option.help, 110, initial_indent="      ", subsequent_indent="      ")
    lines += ["  --print-config", "      Print the whole configuration as JSON and leave."]
    return "\n".join(lines) + "\n"


def _options(cls: type[Any]) -> list[_Option]:
    hints = typing.get_type_hints(cls)
    return [_option_of(item, hints[item.name]) for item in fields(cls) if item.init]


def _option_of(item: Field[Any], kind: Any) -> _Option:
    if kind not in (int, float, bool, str) and not _choices(kind):
        raise TypeError(f"config field {item.name} has a type that flags cannot carry: {kind}")
    if item.default_factory is not MISSING:
        raise TypeError(f"config field {item.name} needs a plain default")
    required = item.default is MISSING
    default = None if required else item.default
    return _Option(item.name, kind, item.metadata.get("help", ""), default, required, item.metadata.get("at_least"))


def _choices(kind: Any) -> tuple[str, ...]:
    """Of what there is to choose, one or, in a tuple, several."""
    if typing.get_origin(kind) is tuple:
        return _choices(typing.get_args(kind)[0])
    if typing.get_origin(kind) is Literal:
        return tuple(str(choice) for choice in typing.get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(str(member.value) for member in kind)
    return ()


def _from_environ(options: Mapping[str, _Option], environ: Mapping[str, str]) -> dict[str, Any]:
    by_variable = {option.variable: option for option in options.values()}
    check_environ(list(by_variable), environ)
    return {
        option.name: option.read(environ[variable], variable)
        for variable, option in by_variable.items()
        if variable in environ
    }


def _from_flags(options: Mapping[str, _Option], argv: Sequence[str]) -> dict[str, Any]:
    by_flag = {option.flag: option for option in options.values()}
    values: dict[str, Any] = {}
    rest = list(argv)
    while rest:
        flag, has_value, text = rest.pop(0).partition("=")
        option = by_flag.get(flag)
        if option is None and flag.startswith("--no-") and not has_value:
            option, has_value, text = by_flag.get("--" + flag.removeprefix("--no-")), "=", "false"
            option = option if option is not None and option.kind is bool else None
        if option is None:
            _refuse(flag, [*by_flag, "--help", "--print-config"])
        if not has_value:
            text = _following(option, rest)
        values[option.name] = option.read(text, flag)
    return values


def _following(option: _Option, rest: list[str]) -> str:
    """The value of a flag written without ``=``: the next word, or nothing at all for a switch."""
    if option.kind is bool:
        return rest.pop(0) if rest and rest[0].lower() in _TRUE + _FALSE else "true"
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{option.flag} needs a value: {option.wants}.")
    return rest.pop(0)


def _refuse(word: str, known: Sequence[str]) -> NoReturn:
    if word.startswith("-"):
        raise ConfigError(f"The option {word} is not known here{_suggestion(word, known)}")
    raise ConfigError(f"The word {word!r} stands alone; options are written --name value.")


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else "; --help lists what is."


def _is_service_link(name: str, value: str) -> bool:
    """Kubernetes puts KVOY_ROUTER_SERVICE_HOST and its like into every pod beside a service called kvoy-router."""
    return bool(_SERVICE_LINK.fullmatch(name)) or (name.endswith("_PORT") and "://" in value)


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError("not finite")
    return value


def _bool(text: str) -> bool:
    lowered = text.lower()
    if lowered not in _TRUE + _FALSE:
        raise ValueError("not a truth value")
    return lowered in _TRUE


def _shown(value: Any) -> str:
    plain = value.value if isinstance(value, Enum) else value
    if isinstance(plain, tuple):
        return ",".join(plain)
    return str(plain).lower() if isinstance(plain, bool) else str(plain) or '""'
