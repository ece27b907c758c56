"""Run folders as a run would leave them, without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_grpo.checks import FORMAT
from lit_grpo.tools.dashboard import sections

HOSTILE = (
    "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">\x1b[2J\u202e"
)
CONFIG = """# lightning.pytorch==2.6.6
trainer:
  max_steps: {updates}
model:
  policy: my/policy
  rewards:
  - function: exact_match
    name: right
  pass_threshold: 0.5
run:
  name: made
"""


def all_metrics() -> list[str]:
    """Every metric of the specification, a family with one or two members; of the user's own two."""
    members = {
        "rewards/*/mean": ["rewards/correct/mean", "rewards/format/mean"],
        "val/pass@*": ["val/pass@1", "val/pass@8"],
    }
    names = [metric.name for section in sections() for metric in section.metrics]
    known = [member for name in names for member in members.get(name, [name.replace("*", "8")])]
    return [*known, "mine/words", "mine/<b>bold</b>"]


def make_checkpoint(version: int = 4) -> dict[str, Any]:
    """The content of a run's checkpoint, but small."""
    moments = {"state": {0: {"exp_avg": torch.randn(40, 30)}}, "param_groups": [{"lr": 1e-3, "params": [0, 1]}]}
    return {
        "state_dict": {"weight": torch.randn(40, 30), "bias": torch.randn(70)},
        "optimizer_states": [moments],
        "lr_schedulers": [],
        "callbacks": {},
        "loops": {"fit_loop": {}},
        "epoch": 0,
        "global_step": version,
        "format": FORMAT,
        "policy_version": version,
        "told": {"model.policy": "tiny"},
        "logged": ({}, {}),
        "reward_curves": ({}, {}),
        "learner": {"beta": 0.0, "history": {}, "skipped": 0, "budget": None},
        "hyper_parameters": {"policy": "tiny", "dtype": "float32", "lora": None},
        "pytorch-lightning_version": "2.0.0",
    }


def make_run(folder: Path, updates: int = 40, names: list[str] | None = None) -> Path:
    """Make a run's folder with metrics, samples, timelines, lengths and settings."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    names = all_metrics() if names is None else names
    share = np.arange(updates + 1) / updates
    table: dict[str, Any] = {name: 0.2 + 0.6 * share + 0.1 * random.standard_normal(updates + 1) for name in names}
    totals = {"num_tokens": 4000.0, "num_completions": 128.0, "time/total_s": 21.0}
    constants = {"memory/capacity_gib": 80.0, "memory/kv_tokens_budget": 1.5}
    for name in table:
        if name in totals:
            table[name] = totals[name] * np.arange(updates + 1)
        elif name in constants:
            table[name] = np.full(updates + 1, constants[name])
        elif name.startswith("val/"):
            table[name] = np.where(np.arange(updates + 1) % 10 == 0, np.clip(table[name], 0, 1), np.nan)
    columns = np.array(list(table.values())).T
    lines = [",".join(["step", *names])]
    lines += [f"{step}," + ",".join("" if np.isnan(v) else f"{v:.6g}" for v in row) for step, row in enumerate(columns)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(CONFIG.format(updates=updates))
    steps = range(1, updates + 1, max(updates // 20, 1))
    _write(folder / "samples.jsonl", [_sample(step, number) for step in steps for number in range(4)])
    _write(folder / "timeline.jsonl", [_timeline(step, random) for step in steps])
    _write(
        folder / "trace.jsonl",
        [_length(step, random) for step in range(max(1, updates - 999), updates + 1) for _ in range(8)],
    )
    return folder


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _sample(step: int, number: int) -> dict[str, Any]:
    return {
        "step": step,
        "prompt_id": f"train/{number}",
        "prompt": f"What is {number} + {number}?",
        "completion": f"It is {2 * number}. {HOSTILE if number == 3 else ''}",
        "tokens": 12,
        "finish": "stop",
        "reward": 1.0 - 0.25 * number,
        "advantage": 1.5 - number,
        "rewards/correct": float(number < 2),
        "rewards/format": None,
        "columns/answer": str(2 * number),
    }


def _timeline(step: int, random: np.random.Generator) -> dict[str, Any]:
    """Eight prompts with eight completions each, in eight slots, in the order of arrival."""
    lengths = np.clip(random.lognormal(3.5, 0.7, 64), 4, 300).astype(int).tolist()
    free, spans = [0] * 8, []
    for completion, length in enumerate(lengths):
        slot = free.index(min(free))
        spans.append([completion, slot, free[slot], free[slot] + length])
        free[slot] += length
    last = max(free)
    clock = [[at, round(at * 0.03, 4), int(900 + 300 * np.sin(at / 40))] for at in range(0, last + 1, 8)]
    clock.append([last, round(last * 0.03, 4), 0])
    return {
        "step": step,
        "slots": 8,
        "slots_kept": 8,
        "kv_limit": 1500,
        "seconds": {"rollout": last * 0.03 + 0.6, "reward_wait": 0.6, "update": 4.2, "weight_sync": 0.7},
        "prompts": [f"train/{number}" for number in range(8)],
        "completions": [
            [number // 8, str(number % 8), length, round(length * 1.1, 1), "stop"]
            for number, length in enumerate(lengths)
        ],
        "spans": spans,
        "clock": clock,
        "prefills": [[0.0, 0.2, 96], [6.0, 6.1, 12]],
    }


def _length(step: int, random: np.random.Generator) -> dict[str, Any]:
    tokens = int(np.clip(random.lognormal(4, 0.8), 1, 1024))
    return {"step": step, "tokens": tokens, "predicted": round(tokens * float(random.lognormal(0, 0.4)), 1)}
