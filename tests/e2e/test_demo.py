"""The demo does what it says, and says it with its exit status."""

from tests.e2e.running import kvoy


def test_the_demo_answers_and_counts():
    ran = kvoy("demo")
    assert "Lindqvist" in ran.stdout
    assert "FAIL" not in ran.stdout
    assert ran.stdout.count("\nok  ") == 6
    for row in (
        "prompt tokens",
        "KV blocks shipped",
        "KV bytes shipped",
        "prefill time",
        "exposed handoff time",
        "time to first token",
        "tokens/s",
    ):
        assert row in ran.stdout
    assert ran.stderr.endswith("the cluster has stopped and left nothing behind.\n")
