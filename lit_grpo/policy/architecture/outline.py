"""A model before memory is taken for it: its modules without content, and the ranges of what it is made from."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Ranges(NamedTuple):
    """Types with ranges for ``lit_grpo.process.inputs.typed``.

    Args:
        natural: A number of things of which there may be none.
        positive: A number of things.
        epsilon: The number that a normalization adds.
        rope_base: The base of a rotary embedding.
    """

    natural: Any
    positive: Any
    epsilon: Any
    rope_base: Any


def ranges() -> Ranges:
    """Return the types of the numbers that a model is made from."""
    from pydantic import Field  # takes a tenth of a second

    return Ranges(
        Annotated[int, Field(ge=0, lt=2**31)],
        Annotated[int, Field(ge=1, lt=2**31)],
        Annotated[float, Field(ge=1e-13, le=0.1)],
        Annotated[float, Field(gt=1, le=1e12)],
    )


def bare_model(config: PreTrainedConfig, vision: bool = False) -> Any:
    """Return the causal language model of a configuration, with ``vision`` that with a tower, on the device ``meta``.

    Raises:
        ValueError: The configuration is of no causal language model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    own = copy.deepcopy(config)
    own._attn_implementation = None  # the file's choice may not be installed here
    with torch.device("meta"):
        kind: Any = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        return kind.from_config(own, trust_remote_code=False)
