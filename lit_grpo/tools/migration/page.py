"""docs/migration.md, made of the tables: ``python -m lit_grpo.tools.migration.page > docs/migration.md``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lit_grpo.tools.migration.metrics import METRICS
from lit_grpo.tools.migration.table import SFT, TRAINER, TRL, VERL, Counterpart

HEAD = """# From TRL and verl

`python -m lit_grpo from-trl CONFIG.yaml` converts a config for `trl grpo --config` (TRL 1.16) to a config of lit_grpo.
Comments at its top name the fields that have another meaning here. `--rows N` is the number of training prompts, for a
config that counts epochs; `--devices N` is the number of devices of the run; `--output FILE` is the file to write. No
field is dropped silently: a field that TRL does not have, or that would change the training and is not supported, is
refused in one sentence. Fields that are left out have TRL's defaults.
With `--sft` the file is one for `trl sft --config`, and the result a run on examples alone, of the [plug-in
`sft`](update.md).

This page is made from the tables that the command uses.

## A Python script

`python -m lit_grpo from-trl SCRIPT.py` converts a script that calls `GRPOTrainer` (or `SFTTrainer`). The script is
parsed, and never imported or run. The command reads:

- the arguments of `GRPOConfig`, and fields that are set on it later: literals, names that are assigned once, sums and
  products of numbers, f-strings, `**` of a literal mapping
- the model, `LoraConfig` and `BitsAndBytesConfig`
- reward functions, tools and environments that the script defines or imports, by their paths
- `load_dataset(...)` with a split

A value that is known only when the script runs is refused with its line; `--drop` leaves it out and names it. Rows that
code of the script makes, by `map` for example, are expected in a file that the notes name:
`dataset.to_json("train_dataset.jsonl")`. A script that takes its config from `TrlParser` gets its arguments after
`--`, as in `from-trl SCRIPT.py --rows 1000 -- --model_name_or_path Qwen/Qwen3-0.6B --learning_rate 1e-5`. Reward
functions, tools and environments of the script are imported by the run, so its call of `train` must stand under
`if __name__ == "__main__":`.

## A run from Python

TRL:

```python
from trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    reward_funcs=[score, short],
    args=GRPOConfig(
        output_dir="runs/first",
        max_steps=100,
        learning_rate=1e-5,
        num_generations=8,
        per_device_train_batch_size=32,
        max_completion_length=256,
        beta=0.04,
        reward_weights=[1.0, 0.1],
    ),
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
trainer.train()
```

lit_grpo:

```python
import functools

import lit_grpo
import torch

run = lit_grpo.train(
    "Qwen/Qwen3-0.6B",
    dataset,
    [score, {"function": short, "weight": 0.1}],
    name="first",
    max_steps=100,
    optimizer=functools.partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.0),
    num_generations=8,
    batch_size=4,
    sampling={"max_tokens": 256},
    objective={"kl": {"beta": 0.04}},
    lora={"r": 16, "alpha": 32.0},
)
```

A `GRPOConfig` can be used as it is: `lit_grpo.train("Qwen/Qwen3-0.6B", dataset, score, **train_arguments(config))`,
with `train_arguments` of `lit_grpo.tools.commands.from_trl`. It carries all fields over with TRL's defaults, such as
the linear decay of the learning rate. A reward may be a function, a path, or either with a weight, name, data sets,
arguments and retries: `{"function": score, "weight": 0.1, "name": "score", "datasets": ["maths"], "retries": 2}`. An
argument of TRL that is given to `lit_grpo.train` is refused with our name of it."""
VERL_REWARD = """
Reward functions with verl's signature are not taken as they are. A wrapper of three lines passes them what they expect,
from a data set with verl's columns:

```python
def score(completion, data_source, reward_model, extra_info=None):
    result = compute_score(data_source, completion, reward_model["ground_truth"], extra_info)
    return result["score"] if isinstance(result, dict) else result
```"""
TITLES = {
    "taken": "Fields of TRL 1.16 that have a counterpart",
    "none": "Fields that have no counterpart, and need none",
    "refused": "Fields that are refused if they are set",
}


def migration_page() -> str:
    return "\n".join([HEAD, *_sections(), ""])


def _sections() -> Iterator[str]:
    yield from _table("Arguments of GRPOTrainer and of lit_grpo.train", "GRPOTrainer", TRAINER)
    yield from _metrics()
    taken = {name: row for name, row in TRL.items() if row.kind in ("same", "changed")}
    yield from _table(TITLES["taken"], "TRL", taken)
    for kind in ("none", "refused"):
        yield f"\n## {TITLES[kind]}\n\n| TRL | reason |\n|---|---|"
        reasons: dict[str, list[str]] = {}
        for name, row in TRL.items():
            if row.kind == kind:
                reasons.setdefault(row.note, []).append(name)
        yield from (f"| {_codes(names)} | {note} |" for note, names in reasons.items())
    own = {name: row for name, row in SFT.items() if row != TRL.get(name)}
    taken = {name: row for name, row in own.items() if row.kind in ("same", "changed")}
    yield from _table("Fields of SFTConfig, with --sft, that differ from these", "TRL", taken)
    yield "\n| TRL, without a counterpart | reason |\n|---|---|"
    reasons = {}
    for name, row in own.items():
        if name not in taken:
            reasons.setdefault(("refused: " if row.kind == "refused" else "") + row.note, []).append(name)
    yield from (f"| {_codes(names)} | {note} |" for note, names in reasons.items())
    yield from _table("The main fields of verl", "verl", VERL)
    yield VERL_REWARD


def _metrics() -> Iterator[str]:
    yield (
        "\n## Metrics of TRL\n\nAll that `GRPOTrainer` logs. Where the last column is empty, the values are the same. "
        "TRL logs each optimizer step;\nhere a row is a batch ([metrics](metrics.md)).\n\n"
        "| TRL | lit_grpo | what differs |\n|---|---|---|"
    )
    for name, row in METRICS.items():
        yield f"| `{name}` | {f'`{row.ours}`' if row.ours else ''} | {row.differs} |".replace("|  |", "| |")


def _table(title: str, trainer: str, rows: Mapping[str, Counterpart]) -> Iterator[str]:
    yield f"\n## {title}\n\n| {trainer} | lit_grpo | note |\n|---|---|---|"
    alike: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name, row in rows.items():
        alike.setdefault((row.fields, row.note), []).append(name)
    for (fields, note), names in alike.items():
        yield f"| {_codes(names)} | {_codes(fields)} | {_beside(fields, note)} |"


def _beside(fields: Sequence[str], note: str) -> str:
    """Return a note without the field name that it begins with, because the table has that in its own column."""
    return re.sub(rf"^(?:{'|'.join(map(re.escape, fields))})(?:[:,;] |$)", "", note)


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(migration_page(), end="")
