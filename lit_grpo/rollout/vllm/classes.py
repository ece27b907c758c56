"""Model classes of transformers that an engine and the policy share in one process."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BY_ENGINE = "do_not_compile"  # an attribute that vLLM gives to the models that it makes
_engines_starting = 0


@contextmanager
def shared_classes(policy: PreTrainedModel) -> Iterator[None]:
    """Start an engine, and let the policy's own classes go on as they were.

    vLLM computes some families, such as GLM, with the model class of transformers, whose ``__init__`` and ``__call__``
    it replaces to compile the model. From then on these are for the engine's models only.
    """
    global _engines_starting
    own: dict[Any, Any] = {kind: kind.__init__ for kind in {type(module) for module in policy.modules()}}
    _engines_starting += 1
    try:
        yield
    finally:
        _engines_starting -= 1
        for kind, own_init in own.items():
            if kind.__init__ is not own_init:
                _divide(kind, own_init)


def _divide(kind: Any, own_init: Any) -> None:
    engine_init, engine_call = kind.__init__, kind.__call__

    @functools.wraps(own_init)
    def init(module: Any, *args: Any, **options: Any) -> None:
        (engine_init if _engines_starting else own_init)(module, *args, **options)

    def call(module: Any, *args: Any, **options: Any) -> Any:
        return (engine_call if _BY_ENGINE in vars(module) else torch.nn.Module.__call__)(module, *args, **options)

    kind.__init__, kind.__call__ = init, call
