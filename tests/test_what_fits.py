"""The table of what fits on a GPU is fit-check's, and the page has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lit_grpo.training.forecast import Sizes, forecast
from scripts.what_fits import DEMAND, MEMORIES_GB, SHAPES, SPARE, WAYS, sizes_of, table, what_fits

PAGE = Path(__file__).parents[1] / "docs" / "memory_and_cost.md"


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(), "put what python -m scripts.what_fits prints into docs/memory_and_cost.md"


def test_what_stands_there_fits_and_a_slot_more_does_not() -> None:
    for model in SHAPES:
        for memory_gb in MEMORIES_GB:
            cell = what_fits(model, memory_gb)
            if cell == "no":
                continue
            way, _, rest = cell.rpartition(", ")[0].rpartition(", ")
            demand, num_slots = WAYS[way][0], int(rest.split()[0])
            sizes = sizes_of(model, demand.mixed, demand.weight_bytes)
            peaks = [forecast(sizes, replace(demand, num_slots=slots)).peak for slots in (num_slots, num_slots + 1)]
            assert peaks[0] <= SPARE * memory_gb * 1e9 and (num_slots == 256 or peaks[1] > SPARE * memory_gb * 1e9)


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
    assert replace(fake, layer_kept_bytes=real.layer_kept_bytes) == real
    assert 1 <= fake.layer_kept_bytes / real.layer_kept_bytes < 1.2  # its attention keeps a copy more


def test_copies_for_recorded_graphs_are_there_in_the_update_too() -> None:
    sizes = sizes_of("0.6B", True, 4)
    on_gpu, on_cpu = (forecast(sizes, replace(DEMAND, num_slots=8, device=device)) for device in ("cuda", "cpu"))
    copies = 2.0 * sizes.parameters
    assert on_gpu.resident["bfloat16 copies to decode with"] == copies == on_cpu.rollout["bfloat16 copies"]
    assert "bfloat16 copies" not in on_gpu.rollout and "bfloat16 copies to decode with" not in on_cpu.resident


def test_packed_copies_are_there_while_the_policy_decodes() -> None:
    sizes = sizes_of("0.6B", False, 4)
    plain, packed = (
        forecast(sizes, replace(DEMAND, num_slots=8, device="cpu", packed=value)) for value in (False, True)
    )
    assert packed.rollout == plain.rollout | {"packed copies": 4.0 * sizes.parameters}
    assert (packed.resident, packed.update) == (plain.resident, plain.update)
