"""The commands around a run. Only this file is imported until one of them is used."""

from typing import NamedTuple


class Tool(NamedTuple):
    """A command: its module, its line in the overview, and whether it takes the settings of a run, as ``fit`` does."""

    module: str
    what: str
    has_settings_of_a_run: bool = False


_HERE = "lit_grpo.tools.commands"
TOOLS = {
    "doctor": Tool(f"{_HERE}.doctor", "a check-up of a run before it begins, with the arguments of fit", True),
    "fit-check": Tool(f"{_HERE}.fit_check", "the memory that a run will take, with the arguments of fit", True),
    "export": Tool(f"{_HERE}.export", "a checkpoint's policy as a Hugging Face folder"),
    "report": Tool(f"{_HERE}.report", "a run as one HTML file"),
    "dashboard": Tool(f"{_HERE}.dashboard", "a view of runs in W&B or TensorBoard"),
    "simulate": Tool(f"{_HERE}.simulate", "plans in pictures, without a model"),
    "serve": Tool(f"{_HERE}.serve", "a vLLM server for a policy"),
    "smollm2": Tool(f"{_HERE}.smollm2", "a pretrained chat model, fetched as a policy"),
    "from-trl": Tool(f"{_HERE}.from_trl", "a config of TRL's as one of ours"),
}
"""The commands by their names on the command line."""
