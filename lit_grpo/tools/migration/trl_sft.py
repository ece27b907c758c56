"""Converts a config of TRL's SFT into one of ours: a run on examples alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lit_grpo.tools.migration.table import SFT
from lit_grpo.tools.migration.trl import Converted, converted, data_of, model_of, run_of, schedule_of

LONGEST = 2**20
"""Tokens of a prompt where TRL has no limit."""


def convert_trl_sft(
    given: Mapping[str, Any], rows: int | None = None, devices: int = 1, drop: bool = False
) -> Converted:
    """Convert the fields of a YAML file for ``trl sft --config``.

    Args:
        given: The fields; those left out have TRL's defaults.
        rows: The number of training rows, to turn epochs into steps.
        devices: The number of devices of the run, each with a process.
        drop: Leave out the fields that have no counterpart here, and name each in a note.

    Raises:
        ValueError: TRL has no such field, or its value is not supported.
    """
    parts = (run_of, lambda taken, given: _batches(taken, rows, devices), _model, _examples)
    return converted(given, SFT, "SFT", parts, drop)


def _batches(taken: Mapping[str, Any], rows: int | None, devices: int) -> dict[str, Any]:
    each, steps = taken["per_device_train_batch_size"], taken["max_steps"]
    batch = each * taken["gradient_accumulation_steps"]
    if steps <= 0:
        if rows is None:
            raise ValueError(
                f"num_train_epochs is {taken['num_train_epochs']}, but a run ends after a number of optimizer steps; "
                "give --rows N, the number of training rows, or max_steps."
            )
        steps = math.ceil(taken["num_train_epochs"] * math.ceil(rows / (batch * devices)))
    return {
        "data.batch_size": batch,
        "data.eval_batch_size": taken["per_device_eval_batch_size"],
        "model.max_tokens_per_micro_batch": max(8192, each * (taken["max_length"] or 0)),
        "trainer.max_steps": steps,
        "trainer.val_check_interval": None if taken["eval_strategy"] == "no" else int(taken["eval_steps"] or 500),
        "trainer.devices": devices if devices > 1 else None,
        "trainer.strategy": "ddp" if devices > 1 else None,
        "model.lr_scheduler": schedule_of(taken, steps),
    }


def _model(taken: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    fields = model_of(taken, given)
    return {name: value for name, value in fields.items() if not name.startswith("model.sampling")}


def _examples(taken: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    if taken["loss_type"] not in ("nll", "chunked_nll"):
        raise ValueError(f"loss_type is {taken['loss_type']!r}, which cannot be had; take nll.")
    if taken["completion_only_loss"] is False and not taken["assistant_only_loss"]:
        raise ValueError(
            "completion_only_loss is false, but prompts are always masked here; set it to true, with a data set of "
            "prompts and completions, or set assistant_only_loss with one of messages."
        )
    fields = data_of(taken, given) | {"data.shuffle": None}
    fields["data.max_prompt_tokens"] = taken["max_length"] or LONGEST
    if taken["assistant_only_loss"]:
        own: dict[str, Any] = {"warm_up": "all"}
        return fields | {
            "data.prompt_column": "messages",
            "data.cut_answers": True,
            "rollout.plugins": [{"sft": own}],
        }
    return fields | {"rollout.plugins": [{"sft": {"column": "completion", "warm_up": "all"}}]}
