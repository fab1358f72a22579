"""Weights of four bits: the codes are the file's own, the product is that of the weights they mean, few rows use it."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from kvoy.core.errors import ConfigError
from kvoy.core.step import PrefillRow, StepPlan
from kvoy.core.types import GREEDY, KvDtype
from kvoy.engine import engine, quant
from kvoy.engine.engine import Engine
from kvoy.engine.gguf_file import GgufFile
from kvoy.engine.layers import ACTIVATIONS, TiledLinear
from kvoy.engine.messages import EngineSettings, RunStep
from kvoy.engine.models import resolve
from kvoy.engine.quant import (
    FEW_ROWS,
    FEW_ROWS_BESIDE_TILES,
    ByRows,
    Int4Gated,
    Int4Linear,
    Int4Weights,
    has_codes,
    read_codes,
    try_int4,
)
from kvoy.engine.slab import nameless_file
from kvoy.engine.weights import load_weights
from tests.engine.gguf_case import write_llama
from tests.engine.running import FAMILIES

KINDS = ["Q4_0", "Q4_1"]


@pytest.fixture(params=KINDS)
def path(request, tmp_path) -> Path:
    return write_llama(tmp_path / "m.gguf", FAMILIES / "llama", kind=gguf.GGMLQuantizationType[request.param])


def test_codes_mean_what_the_file_means(path):
    file = GgufFile(path)
    found = [place for place in file.tensors.values() if has_codes(place)]
    assert found
    for place in found:
        raw = np.frombuffer(file.view(place), np.uint8).reshape(place.shape[0], -1)
        expected = gguf.dequantize(raw, gguf.GGMLQuantizationType(place.type_code))
        assert torch.equal(read_codes(file, place).dequantised(), torch.from_numpy(expected.copy()))


def test_codes_of_the_real_model_are_kept(smollm2):
    file = GgufFile(smollm2.path)
    place = file.tensors["blk.3.attn_q.weight"]
    raw = np.frombuffer(file.view(place), np.uint8).reshape(place.shape[0], -1)
    expected = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType(place.type_code)).copy())
    codes = read_codes(file, place)
    assert torch.equal(codes.dequantised(), expected)
    assert len([one for one in file.tensors.values() if has_codes(one)]) == 210


def test_other_types_and_shapes_have_none(tmp_path):
    for kind in ("Q8_0", "Q5_0", "F16"):
        file = GgufFile(
            write_llama(tmp_path / f"{kind}.gguf", FAMILIES / "llama", kind=gguf.GGMLQuantizationType[kind])
        )
        assert not any(has_codes(place) for place in file.tensors.values())


@pytest.mark.parametrize("rows", range(1, FEW_ROWS + 1))
def test_the_product_is_that_of_the_weights_up_to_rounding(smollm2, rows):
    spec = smollm2.spec()
    names = [f"layers.5.{name}" for name in ("q", "k", "v")]
    exact = torch.cat([load_weights(smollm2, torch.float32)[name] for name in names]).double()
    many = torch.nn.Linear(1, 1)  # never asked
    bias = torch.randn(exact.shape[0]).bfloat16()
    x = torch.randn(rows, spec.hidden).bfloat16()
    found = Int4Weights.of(smollm2, spec).linear(many, names, bias)(x).double()
    expected = x.double() @ exact.T + bias.double()
    assert (found - expected).norm() / expected.norm() < 5e-3
    assert (x @ exact.bfloat16().T + bias - expected).norm() / expected.norm() > 1e-3  # bf16 itself is about as far off


def test_a_gated_product_is_that_of_its_parts(smollm2):
    file = GgufFile(smollm2.path)
    gate, up = (read_codes(file, file.tensors[f"blk.2.ffn_{name}.weight"]) for name in ("gate", "up"))
    x = torch.randn(3, gate.codes.shape[1]).bfloat16()
    for activation in ACTIVATIONS.values():
        expected = torch.empty(3, gate.codes.shape[0], dtype=torch.bfloat16)
        activation.gated_mul(torch.cat([Int4Linear([gate])(x), Int4Linear([up])(x)], 1), expected)
        assert torch.equal(Int4Gated(gate, up, activation)(x), expected)


@pytest.mark.parametrize("is_tiled", [False, True])
def test_few_rows_are_done_by_one_and_many_by_the_other(monkeypatch, is_tiled):
    monkeypatch.setattr(TiledLinear, "__call__", lambda *_: "many")
    many = TiledLinear(None, None) if is_tiled else lambda _: "many"
    few_rows = FEW_ROWS_BESIDE_TILES if is_tiled else FEW_ROWS
    chosen = ByRows(lambda _: "few", many)
    assert [chosen(torch.empty(rows, 1)) for rows in (1, few_rows, few_rows + 1)] == ["few", "few", "many"]


def test_weights_that_a_file_has_in_another_type_stay_as_they_are(smollm2):
    weights = Int4Weights.of(smollm2, smollm2.spec())
    many = torch.nn.Linear(1, 1)
    assert weights.linear(many, ["embed"], None) is many
    assert weights.linear(many, ["layers.0.q", "embed"], None) is many
    assert weights.gated(many, "layers.0.gate", "embed", ACTIVATIONS["silu"]) is many


def test_a_model_without_weights_of_four_bits_is_refused(tmp_path):
    files = resolve(str(FAMILIES / "llama"), tmp_path)
    with pytest.raises(ConfigError, match="but llama has none; use dtype bf16"):
        Int4Weights.of(files, files.spec())


def test_the_probe_says_no_to_an_operator_that_is_missing_or_wrong(monkeypatch):
    assert try_int4()
    monkeypatch.setattr(quant, "_CENTRE", 7)
    assert not try_int4()
    monkeypatch.setattr(quant, "_INNER_K_TILES", "two")
    assert not try_int4()


@pytest.mark.parametrize("works", [True, False])
def test_an_engine_in_int4_computes_in_bf16_where_the_operator_does_not_work(tmp_path, monkeypatch, works):
    path = write_llama(tmp_path / "m.gguf", FAMILIES / "llama", kind=gguf.GGMLQuantizationType.Q4_1)
    monkeypatch.setenv("KVOY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(engine, "try_int4", lambda: works)
    settings = EngineSettings(str(path), "int4", block_tokens=4, pool_bytes=1 << 20, slot_bytes=0, slots=2, threads=1)
    told: list[str] = []
    started = Engine(settings, nameless_file(), told.append)
    assert started.ready.kv_spec.dtype is KvDtype.BF16
    assert any("four-bit weights are of no use" in line for line in told) is not works
    plan = StepPlan(1, (PrefillRow("a", (1, 2, 3), 0, (0,), GREEDY), PrefillRow("b", (4,), 0, (1,), GREEDY)))
    assert len(started.obey(RunStep(plan)).result.sampled) == 2
