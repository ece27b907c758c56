"""The table of docs/your_gpu.md: for each GPU one command a way of training, with the largest model that fits.

``python -m scripts.your_gpu`` prints it. Memory is fit-check's estimate; sizes are those of models without numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lit_grpo.training.forecast import Demand, forecast, largest
from scripts.what_fits import GIB, SPARE, sizes_of

MEMORIES_GB = (8, 12, 16, 24, 48, 80)
MODELS = {
    "Qwen3 8B": "Qwen/Qwen3-8B",
    "Qwen3 4B": "Qwen/Qwen3-4B",
    "Qwen3 1.7B": "Qwen/Qwen3-1.7B",
    "Qwen3 0.6B": "Qwen/Qwen3-0.6B",
    "Qwen2.5 0.5B": "Qwen/Qwen2.5-0.5B-Instruct",
}
"""By name in ``scripts.what_fits``, the id in the Hugging Face hub; the largest first."""
SLOTS = (256, 128, 64, 32, 16)
CONFIG = "--config configs/gsm8k_qwen3_1.7b.yaml --config configs/generators/slots.yaml"
DEMAND = Demand(0, 64, 512, 1024, 4096, device="cuda", mixed=True, checkpointing=True)
"""The settings of that config that decide memory, with smaller micro-batches."""
LORA = "--model.lora.r 32 --model.lora.alpha 64 --model.optimizer.lr 1e-5"
IN_BFLOAT16 = "--model.dtype bfloat16 --trainer.precision bf16-true"


@dataclass(frozen=True)
class Way:
    """A way of training: its name, what decides its memory, and its arguments."""

    name: str
    demand: Demand
    arguments: str = ""


WAYS = (
    Way("all weights", DEMAND),
    Way(
        "all weights, AdamW in 8 bits",
        replace(DEMAND, optimizer="AdamW8bit"),
        "--model.optimizer AdamW8bit --model.optimizer.lr 1e-6",
    ),
    Way("LoRA", replace(DEMAND, lora_rank=32, weight_bytes=2, mixed=False), f"{LORA} {IN_BFLOAT16}"),
    Way(
        "QLoRA",
        replace(DEMAND, lora_rank=32, weight_bytes=2, mixed=False, nf4=True),
        f"{LORA} --model.lora.base nf4 {IN_BFLOAT16}",
    ),
)


def choice(memory_gb: int, way: Way) -> tuple[str, int, float] | None:
    """Return the largest model that leaves room for 16 slots, its slots, and the peak in GiB; None if none does."""
    limit = SPARE * memory_gb * 1e9
    for model in MODELS:
        sizes = sizes_of(model, way.demand.mixed, way.demand.weight_bytes)
        most = largest(sizes, way.demand, "num_slots", limit, SLOTS[0])
        if most >= SLOTS[-1]:
            slots = next(slots for slots in SLOTS if slots <= most)
            return model, slots, forecast(sizes, replace(way.demand, num_slots=slots)).peak / GIB
    return None


def command(model: str, way: Way, slots: int) -> str:
    """Return the whole command, in two lines or three."""
    own = f"--model.policy {MODELS[model]} --model.generator.num_slots {slots} --model.max_tokens_per_micro_batch 4096"
    return " \\\n  ".join(part for part in (f"python -m lit_grpo fit {CONFIG}", own, way.arguments) if part)


def sections() -> Iterator[str]:
    """Yield the section of each GPU, in Markdown; AdamW in 8 bits is there only where it fits a larger model."""
    for memory_gb in MEMORIES_GB:
        found = {way.name: choice(memory_gb, way) for way in WAYS}
        whole, in_8_bits = found[WAYS[0].name], found[WAYS[1].name]
        if whole and in_8_bits and whole[0] == in_8_bits[0]:
            del found[WAYS[1].name]
        lines = [
            f"# {way.name}: {chosen[0]}, {chosen[1]} slots, {chosen[2]:.1f} GiB\n{command(chosen[0], way, chosen[1])}"
            for way in WAYS
            if (chosen := found.get(way.name)) is not None
        ]
        yield f"## {memory_gb} GB\n\n```bash\n" + "\n\n".join(lines) + "\n```\n"
        if whole is None and in_8_bits is None:
            yield "Training all weights fits for none of these models.\n"


if __name__ == "__main__":
    print("\n".join(sections()), end="")
