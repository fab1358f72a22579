"""What a number format costs: perplexity of a text with each format of weights and KV pool, against fp32 throughout.

``python -m bench.precision`` reads a text in the public domain window by window, in chunks over the paged pool, so that
every key and value comes out of the pool in its format. All formats read the same chunk one after the other and are
compared at once. With ``--wire`` the KV of each chunk also crosses a wire in int8 before the next chunk reads it.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from bench.command import Command, at_least_one
from bench.machine import this_machine, usable_cores
from bench.report import Line, Report, Target
from kvoy.core.errors import ConfigError
from kvoy.core.step import PrefillRow, StepPlan
from kvoy.core.types import KvDtype, KvSpec
from kvoy.core.wire import WireRun
from kvoy.engine.batch import Limits, build_batch
from kvoy.engine.kv_cache import KvLayout, KvPool
from kvoy.engine.messages import ExportBlocks, ImportBlocks
from kvoy.engine.model import Decoder
from kvoy.engine.models import ModelFiles, resolve
from kvoy.engine.settings_check import DTYPES, KV_DTYPES
from kvoy.engine.tokenizer import Tokenizer
from kvoy.engine.weights import load_weights

TEXT = Path(__file__).parent / "data" / "devils_dictionary.txt"
MAX_RISE = 0.005
"""Of the perplexity in int8 over that of the same weights with KV of their own format."""
MIN_BF16_RATIO = 1.9
"""KV in int8 takes half of bf16, but for its scales: 4 bytes beside 2 * head_dim."""
FORMATS = (("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "int8"), ("bf16", "bf16"), ("bf16", "int8"))
"""Of weights and KV; the first is what all are compared with."""
WIRES = ("fp32", "bf16")
"""Weights and KV whose KV crosses the wire in int8."""
MAX_WIRE_KL, MIN_WIRE_TOP1, MAX_WIRE_BYTES = 5e-4, 0.98, 0.54
"""Of int8 on the wire: KL in nats and likeliest tokens against the same pool without a wire, bytes against bf16's."""
_ABOUT = "Measure what number formats of weights and KV cost in perplexity."
_BLOCK_TOKENS = 16
_WIRE = KvDtype.INT8_CHANNEL
_WINDOWS_AT_ONCE = 4


@dataclass(slots=True)
class Reading:
    """What a format made of the text so far: sums over its tokens."""

    tokens: int = 0
    surprise: float = 0.0
    """Nats."""
    divergence: float = 0.0
    """KL of the first format's distributions from this one's, nats."""
    agreements: int = 0
    """Tokens that both hold to be the likeliest."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / self.tokens)

    def add(self, logits: Tensor, reference: Tensor, targets: Tensor) -> None:
        """``logits`` and ``reference`` [tokens, vocab], ``targets`` [tokens]: what came next."""
        ours, theirs = logits.log_softmax(-1), reference.log_softmax(-1)
        self.tokens += targets.shape[0]
        self.surprise -= float(ours.gather(1, targets.unsqueeze(1)).double().sum())
        self.divergence += float((theirs.exp() * (theirs - ours)).sum(-1).double().sum())
        self.agreements += int((logits.argmax(-1) == reference.argmax(-1)).sum())


@dataclass(slots=True)
class Reader:
    """A model in one format, and what it has read."""

    weights: str
    kv: str
    decoder: Decoder
    pool: KvPool
    has_wire: bool = False
    """KV is packed into int8 by channel and unpacked again once it is computed."""
    reading: Reading = field(default_factory=Reading)
    """Against the first format."""
    beside_own: Reading = field(default_factory=Reading)
    """Against the same weights and KV without a wire."""

    def logits(self, plan: StepPlan) -> Tensor:
        """Of every token of the plan [tokens, vocab], not of the last of each row only."""
        spec, layout = self.decoder.spec, self.pool.layout
        limits = Limits(spec.vocab_tokens, spec.context_tokens, layout.spec.block_tokens, layout.blocks)
        batch = build_batch(plan, limits)
        return self.decoder.forward(replace(batch, sample_rows=torch.arange(batch.tokens)), self.pool)

    def cross_wire(self, plan: StepPlan) -> None:
        """Pack the blocks that the plan has filled, and unpack them in their places."""
        spec = self.pool.layout.spec
        for row in plan.prefill:
            end = row.start + len(row.token_ids)
            blocks = tuple(row.block_table[row.start // spec.block_tokens : end // spec.block_tokens])
            if blocks:
                slot = memoryview(bytearray(len(blocks) * _wire_spec(spec).block_bytes))
                tokens, run = len(blocks) * spec.block_tokens, WireRun(_WIRE, spec.block_tokens, len(blocks))
                self.pool.export_blocks(ExportBlocks(0, 0, blocks, 0, spec.layers, tokens, _WIRE), slot)
                self.pool.import_blocks(ImportBlocks(0, 0, blocks, 0, spec.layers, run), slot)


def _wire_spec(spec: KvSpec) -> KvSpec:
    return replace(spec, dtype=_WIRE)


def readers(
    files: ModelFiles, formats: Sequence[tuple[str, str]], pool_tokens: int, wires: Sequence[str] = ()
) -> list[Reader]:
    """Formats of equal weights share them. ``wires`` are weights and KV that once more are read over a wire."""
    spec = files.spec()
    decoders: dict[str, Decoder] = {}
    made = []
    wanted = [(*of, False) for of in formats] + [(of, of, True) for of in wires]
    for weights, kv, has_wire in wanted:
        if weights not in decoders:
            decoders[weights] = Decoder(spec, load_weights(files, DTYPES[weights]))
        kv_spec = KvSpec(len(spec.layers), spec.kv_heads, spec.head_dim, _BLOCK_TOKENS, KV_DTYPES[kv])
        pool = KvPool(KvLayout(kv_spec, kv_spec.blocks_for(pool_tokens)))
        made.append(Reader(weights, kv, decoders[weights], pool, has_wire))
    return made


def plans(windows: Sequence[Sequence[int]], chunk_tokens: int) -> Iterator[tuple[StepPlan, Tensor]]:
    """Steps over windows of one length, all at once, and what follows each of their tokens."""
    length = len(windows[0])
    blocks = -(-length // _BLOCK_TOKENS)
    tables = [tuple(range(n * blocks, (n + 1) * blocks)) for n in range(len(windows))]
    for start in range(0, length - 1, chunk_tokens):
        end = min(start + chunk_tokens, length - 1)
        rows = [
            PrefillRow(str(n), tuple(window[start:end]), start, tables[n], None) for n, window in enumerate(windows)
        ]
        yield StepPlan(1, tuple(rows)), torch.tensor([window[start + 1 : end + 1] for window in windows]).view(-1)


@torch.inference_mode()
def read(everyone: Sequence[Reader], ids: Sequence[int], *, window_tokens: int, chunk_tokens: int) -> None:
    """Let all read the text in windows that know nothing of each other; what fills no window is left out."""
    windows = [ids[start : start + window_tokens] for start in range(0, len(ids) - window_tokens + 1, window_tokens)]
    for first in range(0, len(windows), _WINDOWS_AT_ONCE):
        for plan, targets in plans(windows[first : first + _WINDOWS_AT_ONCE], chunk_tokens):
            reference: Tensor | None = None
            own: dict[str, Tensor] = {}
            for reader in everyone:
                logits = reader.logits(plan)
                reference = logits if reference is None else reference
                reader.reading.add(logits, reference, targets)
                if reader.has_wire:
                    reader.beside_own.add(logits, own[reader.weights], targets)
                    reader.cross_wire(plan)
                elif reader.kv == reader.weights:
                    own[reader.weights] = logits


@dataclass(frozen=True, slots=True)
class Cost:
    """What a format costs and saves."""

    weights: str
    kv: str
    kv_token_bytes: float
    bf16_ratio: float
    """How many times smaller than KV in bf16."""
    perplexity: float
    rise: float
    """Of the perplexity over that of the same weights with KV of their own format."""
    kl: float
    """Mean over the tokens, from fp32 throughout."""
    top1: float
    wire: str = ""
    """What KV was on its way; empty: it stayed where it was."""
    own_kl: float = 0.0
    """With a wire: from the same without one."""
    own_top1: float = 1.0


def costs(everyone: Sequence[Reader]) -> list[Cost]:
    own = {reader.weights: reader.reading.perplexity for reader in everyone if _is_own(reader)}
    made = []
    for reader in everyone:
        spec, reading, beside = reader.pool.layout.spec, reader.reading, reader.beside_own
        spec = _wire_spec(spec) if reader.has_wire else spec
        made.append(
            Cost(
                weights=reader.weights,
                kv=reader.kv,
                kv_token_bytes=spec.block_bytes / spec.block_tokens,
                bf16_ratio=replace(spec, dtype=KvDtype.BF16).block_bytes / spec.block_bytes,
                perplexity=reading.perplexity,
                rise=reading.perplexity / own[reader.weights] - 1,
                kl=reading.divergence / reading.tokens,
                top1=reading.agreements / reading.tokens,
                wire="int8" if reader.has_wire else "",
                own_kl=beside.divergence / beside.tokens if reader.has_wire else 0.0,
                own_top1=beside.agreements / beside.tokens if reader.has_wire else 1.0,
            )
        )
    return made


def _is_own(reader: Reader) -> bool:
    return reader.kv == reader.weights and not reader.has_wire


def table(found: Sequence[Cost]) -> str:
    rows = ["weights  KV    wire  bytes a token  bf16/KV  perplexity     rise  KL to fp32    top-1"]
    rows += [
        f"{cost.weights:7}  {cost.kv:4}  {cost.wire:4}  {cost.kv_token_bytes:13,.0f}  {cost.bf16_ratio:7.3f}  "
        f"{cost.perplexity:10.4f}  {cost.rise:+7.3%}  {cost.kl:10.2e}  {cost.top1:7.2%}"
        for cost in found
    ]
    return "\n".join(rows)


def report(found: Sequence[Cost], about: dict[str, object], note: str) -> Report:
    lines = []
    for cost in found:
        if cost.kv == "int8":
            what = f"{cost.weights} weights, int8 KV: perplexity rises by"
            lines.append(Line(what, 100 * cost.rise, "%", target=Target(100 * MAX_RISE, at_least=False)))
            what = f"{cost.weights} weights, int8 KV: tokens in the memory of one in bf16"
            lines.append(Line(what, cost.bf16_ratio, "", target=Target(MIN_BF16_RATIO)))
        if cost.wire:
            lines += _wire_lines(cost)
    details = about | {"formats": [asdict(cost) for cost in found]}
    return Report("precision", this_machine(), lines, (note, table(found)), details)


def _wire_lines(cost: Cost) -> list[Line]:
    what = f"{cost.weights}, int8 on the wire"
    return [
        Line(f"{what}: KL to none", cost.own_kl, "", target=Target(MAX_WIRE_KL, at_least=False)),
        Line(f"{what}: likeliest tokens the same", cost.own_top1, "", target=Target(MIN_WIRE_TOP1)),
        Line(f"{what}: bytes of bf16's", 1 / cost.bf16_ratio, "", target=Target(MAX_WIRE_BYTES, at_least=False)),
    ]


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="as kvoy takes it")
    parser.add_argument("--text", type=Path, default=TEXT, help="a file of text in UTF-8")
    parser.add_argument("--tokens", type=int, default=0, help="read only so many; 0 is all")
    parser.add_argument(
        "--window-tokens", type=at_least_one, default=1024, help="of each of the texts that the text is cut into"
    )
    parser.add_argument("--chunk-tokens", type=at_least_one, default=64, help="of a window that one step reads")
    parser.add_argument("--wire", action="store_true", help="measure KV that crosses a wire in int8, too")
    parser.add_argument("--threads", type=at_least_one, default=len(usable_cores()), help="that compute")


def _measure(options: argparse.Namespace, console: Console) -> Report:
    torch.set_num_threads(options.threads)
    files = resolve(options.model, progress=console.print)
    try:
        text = options.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {options.text} as text in UTF-8: {error}") from error
    ids = Tokenizer.load(files).encode(text, special=False)
    pool_tokens = _WINDOWS_AT_ONCE * (options.window_tokens + _BLOCK_TOKENS)
    everyone = readers(files, FORMATS, pool_tokens, WIRES if options.wire else ())
    read(
        everyone, ids[: options.tokens or None], window_tokens=options.window_tokens, chunk_tokens=options.chunk_tokens
    )
    tokens = everyone[0].reading.tokens
    if not tokens:
        given = min(len(ids), options.tokens or len(ids))
        raise ConfigError(
            f"{given} tokens of text are less than one window of {options.window_tokens}; give a longer text, or lower "
            "--window-tokens" + (", or raise --tokens" if options.tokens else "")
        )
    about: dict[str, object] = {"model": files.name, "text": options.text.name, "tokens": tokens}
    about |= {"window_tokens": options.window_tokens, "chunk_tokens": options.chunk_tokens}
    note = f"{files.name} on {tokens:,} tokens of {options.text.name}, in windows of {options.window_tokens}:"
    return report(costs(everyone), about, note)


def main(words: list[str] | None = None) -> int:
    return Command("precision", _ABOUT, _add_options, _measure).run(words)


if __name__ == "__main__":
    sys.exit(main())
