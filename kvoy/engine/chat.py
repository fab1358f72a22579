"""A conversation to one prompt text, by the Jinja template that a model brings.

Owns the environment that templates expect (as transformers gives it) and the sentences when one fails. A template
is foreign code: it runs in Jinja's sandbox and whatever it raises is an InvalidRequest. Torch-free.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from kvoy.core.errors import InvalidRequest

LONGEST_REASON = 300


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's protocol

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """Jinja's namespace without underscore names, which are a way out of the sandbox."""

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


class ChatTemplate:
    """A compiled template. ``tokens`` are the variables bos_token, eos_token and so on."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._source = source
        self._tokens = dict(tokens)
        self._template: jinja2.Template | None = None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt up to where the assistant's answer starts."""
        try:
            if self._template is None:
                self._template = _environment().from_string(self._source)
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._tokens,
            )
        except Exception as error:  # see the head of this file
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InvalidRequest(
                f"the model's chat template does not take these messages: {reason[:LONGEST_REASON]}", "messages"
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": time.strftime,
        "namespace": _PlainNamespace,
    }
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
