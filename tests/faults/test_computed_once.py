"""A prefill pod that goes on for one that was killed does not compute again what the decode pod has received."""

import pytest

from tests.faults.killing import kill_prefill
from tests.faults.site import Site, ask, prompt
from tests.faults.test_killed import BLOCKS, PACE, TOKENS
from tests.faults.toy_pod import SPEC

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("share", [0.5, 0.99])
async def test_what_was_received_is_not_computed_again(site: Site, share: float) -> None:
    asking = ask(site, prompt(TOKENS))
    survived = await kill_prefill(site, asking, int(share * BLOCKS), PACE)
    assert survived.prefill.computed_tokens <= TOKENS - survived.arrived_blocks * SPEC.block_tokens
