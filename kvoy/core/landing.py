"""Where the blocks of a sender land among ours: the blocks of two pools need not hold as many tokens.

Arithmetic over tokens of one request, no state. Frames count the sender's blocks, from the one that holds the first
token we lack; what we hold of that one is skipped.
"""

from dataclasses import dataclass

from kvoy.core.frames import FrameHeader
from kvoy.core.types import KvSpec
from kvoy.core.wire import WireRun


def blocks_to_ship(sender: KvSpec, held_tokens: int, prompt_tokens: int) -> range:
    """The sender's blocks that bring tokens ``[held_tokens, prompt_tokens)``."""
    end = sender.blocks_for(prompt_tokens)
    return range(min(held_tokens // sender.block_tokens, end) if held_tokens < prompt_tokens else end, end)


@dataclass(frozen=True, slots=True)
class Landing:
    """``sender`` is as frames carry KV, ``own`` as our pool has it; ``held_tokens`` are ours already, in whole blocks
    or to the end of the prompt."""

    sender: KvSpec
    own: KvSpec
    held_tokens: int
    prompt_tokens: int

    @property
    def blocks(self) -> range:
        """The sender's blocks that are to come."""
        return blocks_to_ship(self.sender, self.held_tokens, self.prompt_tokens)

    def whole_tokens(self, whole_blocks: int) -> int:
        """Leading tokens that are in our pool once the sender's first ``whole_blocks`` blocks are."""
        return max(self.held_tokens, min(self.prompt_tokens, whole_blocks * self.sender.block_tokens))

    def place(self, header: FrameHeader) -> tuple[range, WireRun | None]:
        """Which blocks of the request the frame writes, in our count, and how it lies over them; None: block by block,
        in our own format."""
        first_token = header.first_block * self.sender.block_tokens
        end_token = min(first_token + header.blocks * self.sender.block_tokens, self.prompt_tokens)
        first = max(first_token, self.held_tokens) // self.own.block_tokens
        blocks = range(first, self.own.blocks_for(end_token))
        if self.sender == self.own:
            return blocks, None
        return blocks, WireRun(
            self.sender.dtype,
            self.sender.block_tokens,
            header.blocks,
            first_token=first_token - first * self.own.block_tokens,
            skip_tokens=max(0, self.held_tokens - first_token),
        )
