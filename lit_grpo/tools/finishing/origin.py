"""The model that a run began with: its name, its id on the hub, and its license."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from lit_grpo.policy.gguf import GGUFError, gguf_file
from lit_grpo.policy.hub import hub_or_cache
from lit_grpo.policy.loading import adapter_folder
from lit_grpo.policy.named import NAMED, own_folder
from lit_grpo.process.inputs import read_text, read_yaml, typed
from lit_grpo.tools.dashboard.report.rows import Config

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MAX_CARD_BYTES = 2**20
UNREADABLE_CARD = (ValueError, TypeError, KeyError, AttributeError, RecursionError, yaml.YAMLError)
"""The errors that huggingface_hub raises about the metadata of a card."""
UNKNOWN = "unknown"
"""The hub's word for a license that is not known."""
_TEXTS = ("LICENSE", "LICENCE", "NOTICE", "ORIGIN")


@dataclass(frozen=True)
class Origin:
    """The model that a run began with.

    Args:
        name: Its name for a reader: a hub id, the name of a policy of the package, or the last part of a path.
        hub_id: Id of the model on the hub; None if it is not known.
        license: The fields ``license``, ``license_name`` and ``license_link`` of a model card; empty if the license is
            not known.
        source: Where the license was found, as the end of a sentence.
        folder: The folder that may hold its license as a text.
    """

    name: str
    hub_id: str | None = None
    license: dict[str, str] = field(default_factory=dict)
    source: str = ""
    folder: Path | None = None

    @property
    def metadata(self) -> dict[str, str]:
        """The license's fields of a model card."""
        return self.license or {"license": UNKNOWN}

    def texts(self) -> list[Path]:
        """Return the texts that a license may ask to be passed on: LICENSE, NOTICE, and where the weights are from."""
        paths = [] if self.folder is None else sorted(self.folder.glob("*"))
        return [path for path in paths if path.is_file() and path.stem.upper() in _TEXTS]

    def under(self, license: str) -> Origin:
        """Return the same model with a license that the user has named."""
        told = license.strip()
        plain = re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", told)
        named = {"license": told} if plain else {"license": "other", "license_name": re.sub(r"[^\w.+-]+", "-", told)}
        return replace(self, license=named, source="as given with --license")


def find_origin(policy: str, depth: int = 8) -> Origin:
    """Find out what is known of a policy.

    Args:
        policy: As in ``model.policy``: a name, a folder, a GGUF file, or a hub id.
        depth: How many earlier runs are followed: the policy of a run began with another policy.
    """
    policy = own_folder(policy)
    if policy in NAMED:
        named = NAMED[policy]
        where = f"the license of lit_grpo's policy {policy}"
        return Origin(policy, named.hub_id, {"license": named.license}, where, named.folder)
    path = Path(policy)
    if not path.exists() and HUB_ID.fullmatch(policy):
        return Origin(policy, policy, *_of_hub(policy))
    try:
        adapter, file = adapter_folder(policy), gguf_file(policy)
    except (ValueError, OSError):
        return Origin(path.name)
    if file is not None:
        return Origin(path.name, None, *_of_gguf(file))
    card = _metadata(path / "README.md")
    found = _license(card)
    base = card.get("base_model")
    base = base if isinstance(base, str) and HUB_ID.fullmatch(base) else None
    if found:
        return Origin(path.name, base, found, "the model card in its folder", path)
    before = adapter.base if adapter is not None else _began_with(path)
    if before is None or depth == 0:
        return Origin(path.name, base)
    origin = find_origin(before, depth - 1)
    return replace(origin, name=f"{path.name} (trained from {origin.name})" if path.name != "policy" else origin.name)


def _began_with(folder: Path) -> str | None:
    """Return the policy with which the run began that exported a folder; None if the folder is no run's export."""
    path = folder.parent / "config.yaml"
    try:
        config = typed(read_yaml(path) or {}, Config, str(path), "mend the file")
    except (OSError, ValueError):
        return None
    return (config.get("model") or {}).get("policy")


def _metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a model card; empty if there is none that can be read."""
    from huggingface_hub import ModelCard

    try:
        return ModelCard(read_text(path, MAX_CARD_BYTES), ignore_metadata_errors=True).data.to_dict()
    except (OSError, *UNREADABLE_CARD):
        return {}


def _license(card: dict[str, Any]) -> dict[str, str]:
    """Return the fields of a card that name a license; empty if it names none."""
    found = {
        name: card[name] for name in ("license", "license_name", "license_link") if isinstance(card.get(name), str)
    }
    return found if found.get("license", UNKNOWN) != UNKNOWN else {}


def _of_gguf(file: Any) -> tuple[dict[str, str], str]:
    try:
        told = file.header.facts.get("general.license")
    except GGUFError:
        return {}, ""
    return ({"license": told}, "the GGUF file") if isinstance(told, str) and told else ({}, "")


def _of_hub(name: str) -> tuple[dict[str, str], str]:
    """Return the license of a model by its card in the cache, or on the hub if the hub answers."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(name, "README.md")
    try:
        if not isinstance(cached, str):
            with hub_or_cache(name):
                cached = hf_hub_download(name, "README.md")
    except (OSError, ValueError):  # no network, no such file, or an answer that is none
        return {}, ""
    return _license(_metadata(Path(cached))), "the base model's card on the hub"
