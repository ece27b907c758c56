"""The page docs/models.md, made of the newest results: ``python -m scripts.models_page``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scripts.architectures_page import newest, newest_with_vllm, vllm_outcome

MEMORY_PAGE = Path(__file__).parents[1] / "docs" / "memory_and_cost.md"


class Family(NamedTuple):
    """A row: models by the name that people know, their ``model_type``, the smallest size, and what is peculiar."""

    name: str
    model_type: str
    smallest: str
    note: str


FAMILIES = (
    Family("Qwen3.5", "qwen3_5", "Qwen3.5 0.8B", "gated DeltaNet states; text alone, no images"),
    Family("Qwen3", "qwen3", "Qwen3 0.6B", ""),
    Family("Qwen2.5", "qwen2", "Qwen2.5 0.5B", ""),
    Family("Llama 3", "llama", "Llama 3.2 1B", ""),
    Family("Gemma 3", "gemma3_text", "Gemma 3 1B", "sliding windows; from 4B on text alone, and vLLM not here"),
    Family("SmolLM3", "smollm3", "SmolLM3 3B", ""),
    Family("LFM2", "lfm2", "LFM2 350M", "states of short convolutions"),
    Family("Granite 4.0 H", "granitemoehybrid", "Granite 4.0 H 350M", "Mamba 2 states"),
    Family("Phi-4-mini", "phi3", "Phi-4-mini", "slots decode up to the original context of its long RoPE"),
    Family("GPT-OSS", "gpt_oss", "GPT-OSS 20B", "experts, attention sinks, sliding windows"),
    Family(
        "DeepSeek-V2", "deepseek_v2", "DeepSeek-V2-Lite", "experts; slots keep whole keys and values, not latent ones"
    ),
)

HEAD = """# Which models

This page lists families that people train, in no order of merit. *Slots*, *shared prompt*, *vLLM* and *LoRA* (on all
linear layers) are measured on small random models (`{result}`, and `{vllm_result}` for
vLLM); [architectures](architectures.md) explains them and has all families. The GPU is the smallest on which the
smallest size of the family fits, by the [estimate of memory](memory_and_cost.md#what-fits-on-a-gpu), where more sizes
are.

| family | slots | shared prompt | vLLM | LoRA | smallest GPU | note |
|---|---|---|---|---|---|---|"""

STATES = """
## Layers with states

Recurrent and convolution layers keep a state of constant size where attention keeps keys and values. A slot holds these
states beside its KV cache; they are copied when a completion is admitted and when it forks. In the update the prompt of
a group is computed once, and its states, with their gradient, begin every response; in these layers a packed row
becomes a padded batch with a row for each response. On a GPU install `flash-linear-attention` and `causal-conv1d`:
without kernels, plain torch computes the same more slowly. A state cannot be rolled back, so where a branch forks in
the middle of a completion, that part is computed again.

Two things do not work with these layers: `model.sequence_parallel_size` above 1, and vLLM where its build has no such
model (*not here* in the table). `configs/gsm8k_qwen3.5_0.8b.yaml` trains such a model on one GPU of 24 GB (not run
yet).

## What exports carry

Qwen3.5, DeepSeek-V3, GLM-4.5 and others have layers of *multi-token prediction* (MTP) in their files, which draft
tokens for speculative decoding. transformers does not load them, so a run does not train them by default. The exports
of `fit`, `export` and `finish` carry these tensors as they are in the policy that training began with. Their drafts are
never wrong, for the trained policy checks each of them, but it accepts fewer the more it has changed. A GGUF file and
an adapter alone are without them. If the files have no such layers, hold them quantized, or are gone when the run ends,
the `config.json` of the export counts none, and a message says so.

The plug-in `train_mtp` trains such a layer of Qwen3.5 along (`rollout.plugins: [train_mtp]`), by the cross-entropy of
what the policy samples. It has an optimizer of its own, and the policy's gradient is what it is without. Checkpoints
have the trained layer, and so have the exports of `fit`, `export` and `finish`. The slots draft with the layer if
[`drafter: heads`](scheduler.md#drafts) is set.

Other tensors that the model has no place for, such as a critic's head or the vision tower of a model that is trained on
text alone, are left out. The first lines of a run name both kinds. Layers past those that `config.json` counts are
refused. In a policy whose files hold weights in four bits (bitsandbytes) only adapters are trained, and its export has
no quantization; files quantized in other ways are refused if transformers keeps them quantized."""


def models_page(path: Path, path_with_vllm: Path) -> str:
    """Return the page of the two result files of architectures."""
    results = [json.loads(each.read_text()) for each in (path, path_with_vllm)]
    rows, rows_with_vllm = ({row["family"]: row for row in result["rows"]} for result in results)
    head = HEAD.format(result=path.stem, vllm_result=path_with_vllm.stem)
    return "\n".join([head, *_rows(rows, rows_with_vllm), STATES, ""])


def _rows(rows: dict[str, Any], rows_with_vllm: dict[str, Any]) -> Iterator[str]:
    for family in FAMILIES:
        row = rows[family.model_type]
        if row["outcome"] != "exact":
            raise ValueError(f"{family.model_type} is {row['outcome']} in the results; take {family.name} off the page")
        worked = (row["slots"] == "decode", row["prefix"] == "shared")
        slots, prefix = ("yes" if each else "no" for each in worked)
        lora = "yes" if isinstance(row["adapted"], float) else "no"
        vllm = vllm_outcome(rows_with_vllm.get(family.model_type))
        yield f"| {family.name} | {slots} | {prefix} | {vllm} | {lora} | {_gpu(family.smallest)} | {family.note} |"


def _gpu(model: str) -> str:
    """The smallest GPU on which a model fits, and how, from the table of the page of memory."""
    found = re.search(rf"^\| {re.escape(model)} \| (.*) \|$", MEMORY_PAGE.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"docs/memory_and_cost.md has no row of {model}; python -m scripts.what_fits prints its table")
    for memory, cell in zip(("24 GB", "48 GB", "80 GB"), found[1].split(" | "), strict=True):
        if cell != "no":
            return f"{memory}: {model}, {cell.split(', ')[0] if 'bf16' not in cell else 'LoRA in bfloat16'}"
    return f"{model} fits on none"


if __name__ == "__main__":
    print(models_page(newest(), newest_with_vllm()), end="")
