"""``python -m lit_grpo dashboard``: makes a workspace in W&B with our sections and panels."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lit_grpo.cli.parsing.sentences import exit_with


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the workspace and print its address."""
    parser = argparse.ArgumentParser(
        prog="python -m lit_grpo dashboard",
        description="Make a saved view in a W&B project, which shows its runs in the sections of docs/metrics.md: "
        "learning, memory, throughput, lengths, health. Needs the extra wandb, and an API key (wandb login).",
    )
    parser.add_argument(
        "--wandb", metavar="ENTITY/PROJECT", required=True, help="A user or team, and one of their projects."
    )
    parser.add_argument("--name", default="lit_grpo", help="The name of the view (default: %(default)s).")
    options = parser.parse_args(arguments)
    entity, _, project = options.wandb.partition("/")
    if not entity or not project or "/" in project:
        exit_with(f"--wandb is {options.wandb!r}; give an entity and a project, such as my-team/lit_grpo.")
    try:
        print(f"The view is at {save(entity, project, options.name)}")
    except ModuleNotFoundError as error:
        exit_with(f"The package {error.name} is not installed; install lit_grpo[wandb].")
    except Exception as error:  # W&B raises many kinds: no key, no network, no such project
        if os.environ.get("LIT_GRPO_TRACEBACK"):
            raise
        exit_with(f"W&B did not take the view ({str(error).splitlines()[0]:.300}); check wandb login and the project.")


def save(entity: str, project: str, name: str) -> str:
    """Save a workspace; return its address."""
    from lit_grpo.tools.dashboard.workspace import make_workspace

    workspace = make_workspace(entity, project, name)
    workspace.save()
    return workspace.url


if __name__ == "__main__":
    main(sys.argv[1:])
