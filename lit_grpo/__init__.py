"""GRPO on PyTorch Lightning: a larger group takes longer, not more memory.

The pieces: :class:`lit_grpo.module.GRPOModule` holds the policy and its objective,
:class:`lit_grpo.data.PromptDataModule` produces prompts, and ``lit_grpo.callbacks`` do rollouts, weight sync and
monitoring. ``python -m lit_grpo fit --config ...`` puts them together, and so does :func:`lit_grpo.train`.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_grpo.process.threads import prepare

if TYPE_CHECKING:
    from lit_grpo.training import train as train

__version__ = "0.1.0"
prepare()  # before torch is imported, which reads once how its threads are to wait


class _CheckoutCallbacks:
    """Finds ``lit_grpo.callbacks`` in a checkout, whose folder ``callbacks`` stands beside this package."""

    file = Path(__file__).parents[1] / "callbacks" / "__init__.py"

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return spec_from_file_location(name, cls.file) if name == "lit_grpo.callbacks" else None


if not (Path(__file__).parent / "callbacks").is_dir():  # a wheel has them in the package
    sys.meta_path.insert(0, _CheckoutCallbacks)  # first: an editable install may be of another checkout


def __getattr__(name: str) -> Any:
    """Import what trains once it is asked for: most of the time of an import goes there."""
    if name != "train":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lit_grpo.training import train

    return train
