"""``python -m lit_grpo sft``: trains a policy on examples alone, with the settings of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_grpo.cli.command_line import LikeFitCLI, run


class SFTCLI(LikeFitCLI):
    """Runs ``fit`` without rollouts: the warm start of the plug-in ``sft`` lasts for the whole run."""

    def before_instantiate_classes(self) -> None:
        """Set ``warm_up`` of the plug-in to ``all``; the run's config says so, and ``fit`` resumes the run from it."""
        rollout = self._settings["rollout"]
        rollout["plugins"] = without_rollouts(rollout["plugins"])
        super().before_instantiate_classes()


def without_rollouts(plugins: Any) -> list[Any]:
    """Return the settings of plug-ins in which ``sft`` lasts for the whole run.

    Args:
        plugins: ``rollout.plugins``: a name, a mapping, a list of these, or None.

    Raises:
        ValueError: The plug-in is not among them.
    """
    specs: list[Any] = [plugins] if isinstance(plugins, str | Mapping) else list(plugins or ())
    for place, spec in enumerate(specs):
        if isinstance(spec, str) and spec.partition(":")[0] == "sft":
            specs[place] = f"{spec}{',' if ':' in spec else ':'}warm_up=all"
            return specs
        if isinstance(spec, Mapping) and "sft" in spec:
            specs[place] = {"sft": {**(spec["sft"] or {}), "warm_up": "all"}}
            return specs
    raise ValueError(
        "rollout.plugins has no sft, which has the examples; add it with the column of the answers, as in "
        "--rollout.plugins sft:column=solution."
    )


def main(arguments: Sequence[str]) -> None:
    """Train on the examples; a mistake in the input ends the program with one sentence and exit code 2."""
    run(["fit", *arguments], SFTCLI)
