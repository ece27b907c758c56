"""Loading from the Hugging Face hub, or from the cache if the hub does not answer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

PATIENCE_S = 5.0


@functools.cache
def answers(endpoint: str) -> bool:
    """Return whether a hub answers at all; it is asked once in a process."""
    import httpx

    try:
        httpx.head(endpoint, timeout=PATIENCE_S)
    except httpx.HTTPError:
        return False
    return True


@contextmanager
def hub_or_cache(name: str) -> Iterator[None]:
    """Let the code within load a policy from the hub, or only from the cache if the hub does not answer.

    Without this, huggingface_hub would ask six times for every file, and wait in between.

    Raises:
        ValueError: The hub does not answer, and the policy is not in the cache.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_dir()
    if is_path or constants.HF_HUB_OFFLINE or answers(constants.ENDPOINT):
        yield
        return
    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        raise ValueError(
            f"Policy {name!r} is no folder and not in the cache, and the hub {constants.ENDPOINT} cannot be reached; "
            "give a policy's folder, mend the network, or bring another machine's cache and set HF_HUB_OFFLINE=1."
        )
    constants.HF_HUB_OFFLINE = True  # the environment variable of this name sets it too
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


def stored_file(place: str, name: str) -> Path | None:
    """Return the path of a file of a folder or hub id; None if it has no such file."""
    from transformers.utils.hub import cached_file

    path = cached_file(place, name, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def weight_files(name: str) -> list[str]:
    """Return the safetensors files that transformers loads a policy's weights from; none if it has no such files.

    Raises:
        OSError, ValueError: There is no such policy.
    """
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import get_checkpoint_shard_files

    with hub_or_cache(name):
        if (whole := stored_file(name, SAFE_WEIGHTS_NAME)) is not None:
            return [str(whole)]
        index = stored_file(name, SAFE_WEIGHTS_INDEX_NAME)
        return [] if index is None else cast("list[str]", get_checkpoint_shard_files(name, str(index))[0])
