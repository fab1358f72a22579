"""From the samples of a run to its report: rates, ratios within a round, shares of the memory floor.

Pure: figures in, lines and sentences out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median

from bench.engine_run import Measured, Plan, Sample
from bench.engine_work import TARGETS, Decode, Prefill, Work, rate, works
from bench.load import QUIET_SHARE
from bench.machine import Machine
from bench.peers.commands import OURS
from bench.report import Line, Report
from bench.stats import paired_ratio, spread

Rates = dict[tuple[str, Work], dict[int, float]]
"""(engine, work) -> round -> tokens a second."""


def make_report(plan: Plan, measured: Measured, machine: Machine) -> Report:
    rates = _rates(measured)
    every, once = works(quick=plan.quick)
    lines = [line for work in every + once for line in _lines(plan, work, rates)]
    lines += _floor_lines(plan, measured, rates, every + once)
    return Report("engine", machine, lines, _notes(plan, measured), _details(plan, measured))


def _rates(measured: Measured) -> Rates:
    rates: Rates = {}
    for sample in measured.samples:
        rates.setdefault((sample.engine, sample.work), {})[sample.round] = rate(sample.work, sample.seconds)
    return rates


def _lines(plan: Plan, work: Work, rates: Rates) -> Iterator[Line]:
    mine = rates[OURS, work]
    for peer in plan.peers:
        others = rates[peer, _counterpart(work)]
        theirs = [others[number] for number in mine]
        yield Line(
            what=work.name,
            value=median(mine.values()),
            unit="tok/s",
            against=peer,
            against_value=median(theirs),
            ratio=paired_ratio(list(mine.values()), theirs),
            spread=spread([one / other for one, other in zip(mine.values(), theirs, strict=True)]),
            target=TARGETS[peer].get(work),
        )


def _counterpart(work: Work) -> Work:
    """What a peer is asked for where kvoy is asked for chunks."""
    return Prefill(work.prompt_tokens) if isinstance(work, Prefill) else work


def _floor_lines(plan: Plan, measured: Measured, rates: Rates, every: Sequence[Work]) -> Iterator[Line]:
    """How much of the time of a decode step the memory alone would need, for every engine."""
    yield Line("memory read bandwidth", median(measured.bandwidths) / 1e9, "GB/s")
    for work in every:
        if isinstance(work, Decode):
            mine = _floor_percent(measured, rates, OURS, work)
            for peer in plan.peers:
                theirs = _floor_percent(measured, rates, peer, work)
                yield Line(f"floor share, batch {work.batch} at {work.middle_tokens}", mine, "%", peer, theirs)


def _floor_percent(measured: Measured, rates: Rates, engine: str, work: Decode) -> float:
    step_bytes = work.bytes_read(measured.copies.weight_bytes, measured.copies.kv_token_bytes)
    floor_s = step_bytes / median(measured.bandwidths)
    return 100 * floor_s * median(rates[engine, work].values()) / work.batch


def _notes(plan: Plan, measured: Measured) -> list[str]:
    shares = [sample.foreign_share for sample in measured.samples]
    busy = [share for share in shares if share >= QUIET_SHARE]
    notes = [
        f"{measured.copies.name} in {plan.dtype}, cores {', '.join(map(str, plan.cores))}, rounds: {plan.rounds}.",
        "Ratios are taken within a round, and their median is shown. Prompts go in whole, unless a line says chunks.",
        "Floor share: what reading all weights and the KV once would take at that bandwidth, of a decode step's time.",
        *(f"{name}: {about}" for name, about in measured.about.items()),
        f"Others took {100 * median(shares):.0f} % of the machine in the median, at most {100 * max(shares):.0f} %.",
    ]
    if busy:
        notes.append(
            f"The machine was busy in {len(busy)} of {len(shares)} measurements: repeat them when it is quiet before "
            "believing a figure."
        )
    return notes


def _details(plan: Plan, measured: Measured) -> dict[str, object]:
    return {
        "settings": asdict(plan),
        "bandwidths_bytes_per_s": measured.bandwidths,
        "weight_bytes": measured.copies.weight_bytes,
        "kv_token_bytes": measured.copies.kv_token_bytes,
        "about": measured.about,
        "samples": [_sample_json(sample) for sample in measured.samples],
    }


def _sample_json(sample: Sample) -> dict[str, object]:
    return {
        "engine": sample.engine,
        "work": sample.work.name,
        "round": sample.round,
        "tokens_per_s": round(rate(sample.work, sample.seconds), 2),
        "seconds": [round(second, 6) for second in sample.seconds],
        "foreign_share": round(sample.foreign_share, 4),
    }
