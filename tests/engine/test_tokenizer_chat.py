"""Chat templates: what they may use, and that whatever goes wrong in one is a sentence for the caller."""

import re

import pytest

from kvoy.core.errors import InvalidRequest
from kvoy.engine.chat import ChatTemplate

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(HELLO)


def test_blocks_leave_no_lines_behind() -> None:
    source = (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n<{{ m['content'] }}>\n    {% endif %}\n{% endfor %}\n"
    )
    assert render(source) == "<hello>\n"


def test_variables_of_a_template() -> None:
    assert render("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}{{ tools is none }}", bos_token="<s>") == (
        "<s>TrueTrue"
    )


def test_what_transformers_adds_to_jinja() -> None:
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hello"}]'
    assert render("{{ {'\u00e4': '<'} | tojson(indent=1) }}") == '{\n "\u00e4": "<"\n}'
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))
    assert render("{% generation %}a{{ messages[0].content }}{% endgeneration %}b") == "ahellob"
    assert render("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}") == "1"
    assert render("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}") == "2"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ raise_exception('Roles must\n alternate') }}", "Roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__x = 1 %}", "__x"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for x in range(10000000) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_fails_says_why(source: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        render(source)
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 400


def test_messages_are_copies() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert ChatTemplate("{% set m = messages[0] %}{{ m.content }}", {}).render(messages) == "x"
    assert messages == [{"role": "user", "content": "x"}]
