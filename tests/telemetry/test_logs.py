"""A log record is one line, whatever is in it."""

import io
import logging

import pytest

from kvoy.telemetry.logs import about, configure


@pytest.fixture
def stream():
    root = logging.getLogger()
    before = root.handlers[:], root.level
    text = io.StringIO()
    configure("info", "decode-1a2b", text)
    yield text
    root.handlers[:], root.level = before[0], before[1]


def test_a_line_says_when_how_bad_who_and_what(stream):
    logging.getLogger("kvoy.x").warning("lease %s ended", "L1", extra=about(request="r 1", blocks=4, why=""))
    line = stream.getvalue()
    assert line.endswith('Z warning decode-1a2b kvoy.x lease L1 ended request="r 1" blocks=4 why=""\n')
    assert line[10] == "T"


def test_what_is_below_the_level_is_not_written(stream):
    logging.getLogger("kvoy.x").debug("quiet")
    logging.getLogger("httpx").info("GET /")
    assert stream.getvalue() == ""


def test_line_breaks_and_traces_stay_on_one_line(stream):
    try:
        raise RuntimeError("first\nsecond")
    except RuntimeError:
        logging.getLogger("kvoy.x").exception("it\nbroke", extra=about(detail="a\nb"))
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert "it broke" in text
    assert 'detail="a\\nb"' in text
    assert "RuntimeError: first\\nsecond" in text
