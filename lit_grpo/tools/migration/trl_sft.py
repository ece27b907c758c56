"""Converts a config of TRL's SFT into one of ours: a run on examples alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from lit_grpo.tools.migration.table import SFT
from lit_grpo.tools.migration.trl import Converted, converted, data_of, length_of, model_of, rows_of, run_of

LONGEST = 2**20
"""Tokens of a prompt where TRL has no limit."""


def convert_trl_sft(
    given: Mapping[str, Any], rows: int | None = None, devices: int = 1, drop: bool = False
) -> Converted:
    """Convert the fields of a YAML file for ``trl sft --config``."""
    return converted(given, SFT, "SFT", (run_of, partial(_batches, rows, devices), _model, _examples), drop)


def _batches(rows: int | None, devices: int, taken: Mapping[str, Any]) -> dict[str, Any]:
    each, steps = taken["per_device_train_batch_size"], taken["max_steps"]
    batch = each * taken["gradient_accumulation_steps"]
    if steps <= 0:
        steps = math.ceil(taken["num_train_epochs"] * math.ceil(rows_of(taken, rows, "rows") / (batch * devices)))
    interval = None if taken["eval_strategy"] == "no" else int(taken["eval_steps"] or 500)
    return {
        "data.batch_size": batch,
        "data.eval_batch_size": taken["per_device_eval_batch_size"],
        "model.max_tokens_per_micro_batch": max(8192, each * (taken["max_length"] or 0)),
        **length_of(taken, steps, interval, devices),
    }


def _model(taken: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model_of(taken).items() if not name.startswith("model.sampling")}


def _examples(taken: Mapping[str, Any]) -> dict[str, Any]:
    if taken["loss_type"] not in ("nll", "chunked_nll"):
        raise ValueError(f"loss_type is {taken['loss_type']!r}, which cannot be had; take nll.")
    if taken["completion_only_loss"] is False and not taken["assistant_only_loss"]:
        raise ValueError(
            "completion_only_loss is false, but prompts are always masked here; set it to true, with a data set of "
            "prompts and completions, or set assistant_only_loss with one of messages."
        )
    fields = data_of(taken) | {"data.shuffle": None, "data.max_prompt_tokens": taken["max_length"] or LONGEST}
    plugin = {"warm_up": "all"}
    if taken["assistant_only_loss"]:
        fields |= {"data.prompt_column": "messages", "data.cut_answers": True}
    else:
        plugin = {"column": "completion", **plugin}
    return fields | {"rollout.plugins": [{"sft": plugin}]}
