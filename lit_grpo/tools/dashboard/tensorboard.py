"""TensorBoard's view of the boards: tags by section, the layout of its custom scalars, and its HParams."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lit_grpo.tools.dashboard.specification import explain, sections

OWN = "Own"


@functools.cache
def tag(name: str) -> str:
    """Return the tag of a metric: its section with a number, then its name, such as ``1 Learning/reward``.

    TensorBoard sorts by tag, and groups by the part before the first slash. A user's own metrics come last.
    """
    found = explain(name)
    return f"{_group(found[0].title) if found else _group(OWN)}/{name}"


def _group(title: str) -> str:
    titles = [*(section.title for section in sections()), OWN]
    return f"{titles.index(title) + 1} {title}"


def scalars(values: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto import summary_pb2

    summary: Any = summary_pb2.Summary  # pyrefly: ignore[missing-attribute]  # protobuf makes it at import
    return summary(value=[summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def layout() -> dict[str, dict[str, list[Any]]]:
    """Return the panels as TensorBoard's custom scalars; tags are regular expressions there."""
    return {
        section.title: {
            panel.title: ["Multiline", [f"^{_pattern(name)}$" for name in panel.metrics]] for panel in section.panels
        }
        for section in sections()
    }


def _pattern(name: str) -> str:
    return re.escape(tag(name)).replace(r"\*", ".*")


def hyperparameters(settings: Mapping[str, Any]) -> Iterator[Any]:
    """Make the summaries with which TensorBoard's HParams compares runs, by reward and pass@1."""
    from torch.utils.tensorboard.summary import hparams

    values = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in _flat(settings)}
    yield from hparams(values, {tag("reward"): None, tag("val/pass@1"): None})


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
