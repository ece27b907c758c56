"""``python -m lit_grpo fit-check``: estimates the memory that a run takes on a device, without loading weights."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lit_grpo.cli.command_line import GROUPS, MISTAKES, LikeFitCLI, cli_arguments, quieten
from lit_grpo.cli.parsing.errors import InputParser, one_sentence
from lit_grpo.cli.parsing.places import with_place
from lit_grpo.cli.parsing.refusals import check_values
from lit_grpo.cli.parsing.sentences import exit_with
from lit_grpo.memory import free_bytes
from lit_grpo.policy.loading import load_config
from lit_grpo.scheduling.memory_amount import MemoryAmount
from lit_grpo.training.forecast import Demand, Forecast, Sizes, Tower, demand_of, forecast, largest

GIB = 2**30
FOUND = ("num_slots", "micro_batch_tokens")
LORA_RANK = 32  # of the adapters that are suggested
FIELD_NAMES = {"num_slots": "model.generator.num_slots", "micro_batch_tokens": "model.max_tokens_per_micro_batch"}


class FitCheckCLI(LikeFitCLI):
    """Parses the settings of a run as ``fit`` does, and makes no objects of them.

    Args:
        limit: The device's memory in bytes; None takes what is free on this machine's device.
        kwargs: Keyword arguments that are passed on to LightningCLI.
    """

    def __init__(self, limit: int | None, **kwargs: Any) -> None:
        self._limit = limit
        super().__init__(run_folder=None, **kwargs)  # pyrefly: ignore[bad-argument-type]  # nothing is written

    def before_instantiate_classes(self) -> None:
        """Compute and show the estimate, and exit with 0 if it fits, else 1."""
        settings = self._settings
        check_values(settings, GROUPS)
        device = _device_of(settings["trainer"]["accelerator"])
        demand = demand_of(settings, device)
        limit = self._limit or _free_on(device)
        sizes = Sizes.of(load_config(settings["model"]["policy"]), demand.mixed, demand.weight_bytes)
        sizes = replace(sizes, tower=Tower.of(settings["model"], demand))
        taken = forecast(sizes, demand)
        _show(sizes, demand, taken, limit)
        sys.exit(int(taken.peak > limit))


def _device_of(accelerator: str) -> str:
    """Return the kind of device that the run is for, which this machine need not have."""
    on_gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())
    return "cuda" if on_gpu else "cpu"


def _free_on(device: str) -> int:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "trainer.accelerator is gpu, but this machine has no CUDA GPU whose memory could be asked for; give the "
            "memory of the one that is meant, such as --memory 80GiB."
        )
    return free_bytes(torch.device(device))


def _show(sizes: Sizes, demand: Demand, taken: Forecast, limit: float) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 120, markup=False, emoji=False)
    table = Table("part", "when")
    table.add_column("GiB", justify="right")
    for when, parts in (
        ("always", taken.resident), ("rollout", taken.rollout), ("update", taken.update), ("step", taken.step),
    ):  # fmt: skip
        for part, num_bytes in parts.items():
            table.add_row(part, when, f"{num_bytes / GIB:.3g}")
    table.add_section()
    table.add_row("all", "peak", f"{taken.peak / GIB:.3g}")
    console.print(table, highlight=False)
    verdict = "fits into" if taken.peak <= limit else "does not fit into"
    console.print(f"{sizes.parameters:,} parameters; it {verdict} {limit / GIB:.3g} GiB.", highlight=False)
    for field in FOUND:
        most = largest(sizes, demand, field, limit)
        at_most = f"at most {most:,}" if most < 2**20 else "over a million"
        console.print(f"With the rest as it is, {FIELD_NAMES[field]} can be {at_most}.", highlight=False)
    changes: dict[str, dict[str, Any]] = {
        "gradient_checkpointing": {"checkpointing": True},
        "AdamW8bit": {"optimizer": "AdamW8bit"},
        f"model.lora (r: {LORA_RANK})": {"lora_rank": demand.lora_rank or LORA_RANK},
    }
    for text, change in changes.items():
        other = forecast(sizes, replace(demand, **change)).peak
        if other < 0.98 * taken.peak:
            console.print(f"With {text} the peak is {other / GIB:.3g} GiB.", highlight=False)


def _amount(text: str) -> int:
    amount = MemoryAmount(text, "--memory")
    if amount.kind != "bytes":
        raise ValueError(f"--memory is {text!r}, but is the device's whole memory; give an amount such as 80GiB.")
    return int(amount.amount)


def main(arguments: Sequence[str]) -> None:
    """Show the memory that ``fit`` would take with these arguments; ``--memory 80GiB`` sets the device's memory."""
    quieten()
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--memory")
    options, others = own.parse_known_args(arguments)
    try:
        limit = None if options.memory is None else _amount(options.memory)
        FitCheckCLI(limit, **cli_arguments(["fit", *others]))
    except MISTAKES as error:
        if os.environ.get("LIT_GRPO_TRACEBACK"):
            raise
        exit_with(with_place(one_sentence(str(error)), InputParser.given))
