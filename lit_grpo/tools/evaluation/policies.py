"""The policies that are evaluated, as the command line names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_grpo.checkpoints import checked, settled
from lit_grpo.policy.named import resolve_policy

_OF_A_POLICY = ("config.json", "adapter_config.json")
_OF_A_RUN = ("versions.json",)


@dataclass(frozen=True)
class PolicySource:
    """A policy of the command line.

    Args:
        name: The policy as the command line names it.
        policy: The value of ``model.policy``.
        run: Folder of the run that the policy belongs to; None if it belongs to none.
        checkpoint: Checkpoint whose weights are loaded after those of ``policy``; None if the policy is a model.
        lora: The adapters of the checkpoint, as ``model.lora`` has them; None without a checkpoint or adapters.
        dtype: The dtype of the checkpoint's weights; None without a checkpoint.
    """

    name: str
    policy: str
    run: Path | None = None
    checkpoint: Path | None = None
    lora: dict[str, Any] | None = None
    dtype: str | None = None


def find_policies(given: Sequence[str]) -> list[PolicySource]:
    """Return the policies: models, folders of runs, and checkpoints of runs.

    Raises:
        ValueError: A run has no policy yet, a checkpoint cannot be read, or a policy is given twice.
    """
    sources = [find_policy(one) for one in given]
    places: dict[tuple[str, Path | None], str] = {}
    for source in sources:
        place = resolve_policy(source.policy)
        place = str(Path(place).resolve()) if Path(place).exists() else place
        if (same := places.get(key := (place, source.checkpoint))) is not None:
            also = "" if same == source.name else f", also as {same!r}"
            raise ValueError(f"The policy {source.name!r} is given twice{also}; give each policy once.")
        places[key] = source.name
    return sources


def find_policy(given: str) -> PolicySource:
    """Return one policy.

    Raises:
        ValueError: A run has no policy yet, or a checkpoint cannot be read.
    """
    path = Path(given)
    if path.suffix == ".ckpt":
        return _of_checkpoint(given, path)
    if not path.is_dir() or _has(path, _OF_A_POLICY):
        run = path.parent if path.is_dir() and _has(path.parent, _OF_A_RUN) else None
        return PolicySource(given, given, run)
    if _has(path / "policy", _OF_A_POLICY):
        return PolicySource(given, str(path / "policy"), path)
    if _has(path, _OF_A_RUN):
        checkpoints = sorted(str(one) for one in path.glob("checkpoints/*.ckpt"))
        give = f"give one of its checkpoints, such as {checkpoints[-1]}" if checkpoints else "wait for the run to end"
        raise ValueError(f"The run {given!r} has saved no policy, which it does at its end; {give}.")
    return PolicySource(given, given)


def _of_checkpoint(given: str, path: Path) -> PolicySource:
    checkpoint = settled(path)
    if not checkpoint.exists():
        there = " or ".join(sorted(map(str, path.parent.glob("*.ckpt")))) or "one of a run's checkpoints"
        raise ValueError(f"There is no checkpoint {given!r}; give {there}.")
    saved = checked(checkpoint)["hyper_parameters"]
    policy, lora, dtype = saved["policy"], saved["lora"], saved["dtype"]
    if not policy:
        raise ValueError(
            f"The checkpoint {given!r} is of a model that was made, not loaded; give the policy that the run has saved."
        )
    run = path.parent.parent if _has(path.parent.parent, _OF_A_RUN) else None
    return PolicySource(given, policy, run, checkpoint, lora, dtype)


def _has(folder: Path, files: Sequence[str]) -> bool:
    return any((folder / name).is_file() for name in files)
