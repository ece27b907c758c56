"""``python -m lit_grpo export``: writes a checkpoint's policy as a Hugging Face folder."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_grpo.checkpoints import checked, read, settled
from lit_grpo.cli.parsing.sentences import exit_with
from lit_grpo.process.files import new_folder
from lit_grpo.process.signals import exit_on_signals
from lit_grpo.process.terminal import first_line

if TYPE_CHECKING:
    from lit_grpo.module import GRPOModule


class NotLoadedError(ValueError):
    """A checkpoint is of a model that was made in Python, so there is no place to load its base from."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Load the checkpoint and save its policy; a mistake ends with one sentence and exit code 2."""
    parser = argparse.ArgumentParser("python -m lit_grpo export", description=__doc__, allow_abbrev=False)
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="such as runs/NAME/checkpoints/best.ckpt")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the folder to write, new or empty")
    parser.add_argument("--policy", help="the folder of the policy that training began with, if it has been moved")
    options = parser.parse_args(arguments)
    checkpoint = settled(options.checkpoint)
    if not os.path.exists(checkpoint):  # Path's fails for a name that is too long
        there = sorted(map(str, options.checkpoint.parent.glob("*.ckpt")))
        give = " or ".join(there) or "one of a run's checkpoints"
        exit_with(f"There is no checkpoint {str(options.checkpoint)!r}; give {give}.")
    if os.path.lexists(options.folder) and (not options.folder.is_dir() or any(options.folder.iterdir())):
        exit_with(f"{str(options.folder)!r} exists already; give a folder that is new or empty.")
    exit_on_signals()
    folder = options.folder
    try:
        module = load_checkpoint(checkpoint, options.policy)
        with new_folder(options.folder) as folder:
            compared = module.export(folder)
    except OSError as error:
        exit_with(f"{options.folder} cannot be written ({error.strerror}); give another folder.")
    except ValueError as error:
        exit_with(str(error).replace(str(folder), str(options.folder)))
    print(f"The policy is in {options.folder}: {compared}.")


def load_checkpoint(checkpoint: Path, policy: str | None = None) -> GRPOModule:
    """Return the module of a checkpoint, with its policy.

    Args:
        checkpoint: The file, or the folder of shards.
        policy: The policy that training began with, if it has been moved.

    Raises:
        NotLoadedError: That policy was made, not loaded, and ``policy`` does not say where it is.
        ValueError: The checkpoint is damaged, or none of a run.
    """
    from lit_grpo.module import GRPOModule

    checked(checkpoint)
    try:
        saved = read(checkpoint, only=("state_dict",))
        told: dict[str, Any] = saved["hyper_parameters"] | ({} if policy is None else {"policy": policy})
        if not told["policy"]:
            raise NotLoadedError(
                f"{str(checkpoint)!r} is of a model that was made, not loaded; save the model that training began with "
                "as a folder, with its tokenizer, and give the folder as --policy."
            )
        module = GRPOModule(**told)
        module.configure_model()
        module.on_load_checkpoint(saved)
        module.load_state_dict(saved["state_dict"], strict=module.strict_loading)
    except NotLoadedError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        raise ValueError(f"The policy of {str(checkpoint)!r} cannot be loaded: {first_line(error)}") from error
    return module
