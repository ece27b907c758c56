"""The table of what fits on a GPU is fit-check's, and the page has it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import table_rows

from lit_grpo.training.forecast import Sizes, forecast
from scripts.what_fits import DEMAND, MEMORIES_GB, MODELS, SPARE, WAYS, row, sizes_of, table, what_fits

PAGE = Path(__file__).parents[1] / "docs" / "memory_and_cost.md"
QUICK = ("Llama 3.2 3B", "LFM2 350M")  # one that takes three of the ways, and a hybrid


def test_the_page_has_a_row_for_each_model_and_no_other() -> None:
    rows = re.findall(r"^\| (.*?) \| .* slots, ", PAGE.read_text(), re.MULTILINE)
    assert rows == [*MODELS]


@pytest.mark.parametrize("model", QUICK)
def test_a_row_of_the_page_is_that_of_the_script(model: str) -> None:
    assert row(model) in PAGE.read_text().splitlines(), "put what python -m scripts.what_fits prints into the page"


@pytest.mark.nightly
def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(), "put what python -m scripts.what_fits prints into docs/memory_and_cost.md"


def test_what_stands_there_fits_and_a_slot_more_does_not() -> None:
    for model in QUICK:
        for memory_gb in MEMORIES_GB:
            cell = what_fits(model, memory_gb)
            way, _, rest = cell.rpartition(", ")[0].rpartition(", ")
            demand, num_slots = WAYS[way][0], int(rest.split()[0])
            sizes = sizes_of(model, demand.mixed, demand.weight_bytes)
            peaks = [forecast(sizes, replace(demand, num_slots=slots)).peak for slots in (num_slots, num_slots + 1)]
            assert peaks[0] <= SPARE * memory_gb * 1e9 and (num_slots == 256 or peaks[1] > SPARE * memory_gb * 1e9)


PUBLISHED = [
    *(("Qwen2.5 0.5B", 494_032_768), ("Gemma 3 1B", 999_885_952)),
    *(("Llama 3.2 1B", 1_235_814_400), ("Llama 3.2 3B", 3_212_749_824)),
]


@pytest.mark.parametrize(("model", "parameters"), table_rows(PUBLISHED, PUBLISHED[3:]))
def test_a_shape_has_the_published_number_of_parameters(model: str, parameters: int) -> None:
    assert sizes_of(model, True, 4).parameters == parameters


def test_sizes_without_numbers_are_those_of_a_model() -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64,
    )  # fmt: skip
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = Sizes.of(config, mixed=True)
    with FakeTensorMode():
        fake = Sizes.of(config, mixed=True)
    kept = {name: getattr(real, name) for name in ("layer_kept_bytes", "largest_kept_bytes")}
    assert replace(fake, **kept) == real
    assert 1 <= fake.layer_kept_bytes / real.layer_kept_bytes < 1.2  # its attention keeps a copy more


def test_copies_for_recorded_graphs_are_there_in_the_update_too() -> None:
    sizes = sizes_of("Llama 3.2 3B", True, 4)
    on_gpu, on_cpu = (forecast(sizes, replace(DEMAND, num_slots=8, device=device)) for device in ("cuda", "cpu"))
    copies = 2.0 * sizes.parameters
    assert on_gpu.resident["bfloat16 copies to decode with"] == copies == on_cpu.rollout["bfloat16 copies"]
    assert "bfloat16 copies" not in on_gpu.rollout and "bfloat16 copies to decode with" not in on_cpu.resident


def test_packed_copies_are_there_while_the_policy_decodes() -> None:
    sizes = sizes_of("Llama 3.2 3B", False, 4)
    plain, packed = (
        forecast(sizes, replace(DEMAND, num_slots=8, device="cpu", packed=value)) for value in (False, True)
    )
    assert packed.rollout == plain.rollout | {"packed copies": 4.0 * sizes.parameters}
    assert (packed.resident, packed.update) == (plain.resident, plain.update)
