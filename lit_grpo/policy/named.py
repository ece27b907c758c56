"""Policies that have a name of their own, such as ``tiny``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lit_grpo.process.files import cache_folder


@dataclass(frozen=True)
class NamedPolicy:
    """A folder that a policy's name stands for.

    Args:
        folder: The folder, as ``save_pretrained`` writes it.
        remedy: Remedy if the folder is missing or damaged, as part of a sentence.
        license: License of the weights, by its SPDX identifier in lower case.
        hub_id: The model's id on the Hugging Face hub; None for one that is not there.
    """

    folder: Path
    remedy: str
    license: str = "mit"
    hub_id: str | None = None


TINY, TINY_HYBRID, TINY_KNIGHTS, SMOLLM2 = "tiny", "tiny_hybrid", "tiny_knights", "smollm2"
TINY_CALCULATOR, TINY_CATCH, TINY_SHAPES = "tiny_calculator", "tiny_catch", "tiny_shapes"
_WITH_THE_PACKAGE = "install lit_grpo again"
NAMED = {
    TINY: NamedPolicy(Path(__file__).parent / TINY, _WITH_THE_PACKAGE),
    TINY_HYBRID: NamedPolicy(Path(__file__).parent / TINY_HYBRID, _WITH_THE_PACKAGE),
    TINY_KNIGHTS: NamedPolicy(Path(__file__).parent / TINY_KNIGHTS, _WITH_THE_PACKAGE),
    TINY_CALCULATOR: NamedPolicy(Path(__file__).parent / TINY_CALCULATOR, _WITH_THE_PACKAGE),
    TINY_CATCH: NamedPolicy(Path(__file__).parent / TINY_CATCH, _WITH_THE_PACKAGE),
    TINY_SHAPES: NamedPolicy(Path(__file__).parent / TINY_SHAPES, _WITH_THE_PACKAGE),
    SMOLLM2: NamedPolicy(
        cache_folder() / "policies" / "SmolLM2-135M-Instruct",
        f"make it with python -m lit_grpo {SMOLLM2}",
        "apache-2.0",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}
"""The policies by name.

``python -m scripts.make_tiny``, ``make_knights``, ``make_calculator``, ``make_catch`` and ``make_shapes`` make the
folders in the package.
"""


def is_packaged(policy: object) -> bool:
    """Return whether a policy is one that comes with the package, together with its tokenizer."""
    named = NAMED.get(own_folder(policy)) if isinstance(policy, str) else None
    return named is not None and named.folder.parent == Path(__file__).parent


def own_folder(policy: str) -> str:
    """Return ``./NAME`` if a name of :data:`NAMED` is also that of a policy's folder in the working directory.

    The user's folder is then meant. Any other name is returned unchanged.
    """
    here = Path(policy) if policy in NAMED else None
    is_policy = here is not None and any((here / name).is_file() for name in ("config.json", "adapter_config.json"))
    return f"./{policy}" if is_policy else policy


def resolve_policy(policy: str) -> str:
    """Return the folder that a name of :data:`NAMED` stands for, and any other name unchanged.

    A policy's folder of that name in the working directory has precedence (:func:`own_folder`).

    Raises:
        ValueError: The folder is missing.
    """
    policy = own_folder(policy)
    named = NAMED.get(policy)
    if named is None:
        return policy
    if not named.folder.is_dir():
        holds = "the folder ./{0} holds no config.json, and there" if Path(policy).is_dir() else "there"
        sentence = f"{holds.format(policy)} is no folder of policy {policy!r} on this machine; {named.remedy}."
        raise ValueError(sentence[0].upper() + sentence[1:])
    return str(named.folder)
