"""Plain torch twins of kv_pack and kv_unpack: the specification, and what the CPU runs. One copy a block."""

from torch import Tensor


def kv_pack(pool: Tensor, blocks: Tensor, first_layer: int, valid_tokens: int, wire: Tensor) -> None:
    _, layers, _, block_tokens, _ = wire.shape
    for index, block in enumerate(blocks.tolist()):
        wire[index].copy_(pool[block, first_layer : first_layer + layers])
        filled = min(max(valid_tokens - index * block_tokens, 0), block_tokens)
        wire[index, :, :, filled:].zero_()


def kv_unpack(wire: Tensor, blocks: Tensor, first_layer: int, pool: Tensor) -> None:
    layers = wire.shape[1]
    for index, block in enumerate(blocks.tolist()):
        pool[block, first_layer : first_layer + layers].copy_(wire[index])
