"""Which commands there are beside those of a run; this page alone is read until one of them is asked for."""

from typing import NamedTuple


class Tool(NamedTuple):
    """A command: what to say of it in the overview, and whether it takes the settings of a run, as ``fit`` does."""

    module: str
    what: str
    has_settings_of_a_run: bool = False


_HERE = "lit_grpo.tools.commands"
TOOLS = {
    "doctor": Tool(f"{_HERE}.doctor", "a check-up of a run before it begins, with the arguments of fit", True),
    "fit-check": Tool(f"{_HERE}.fit_check", "what a run will take of memory, with the arguments of fit", True),
    "export": Tool(f"{_HERE}.export", "a checkpoint's policy as a Hugging Face folder"),
    "report": Tool(f"{_HERE}.report", "a run as one HTML file"),
    "dashboard": Tool(f"{_HERE}.dashboard", "a view of runs in W&B or TensorBoard"),
    "simulate": Tool(f"{_HERE}.simulate", "plans in pictures, without a model"),
    "serve": Tool(f"{_HERE}.serve", "a vLLM server for a policy"),
    "from-trl": Tool(f"{_HERE}.from_trl", "a config of TRL's as one of ours"),
}
"""By the word on the command line."""
