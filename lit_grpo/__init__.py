"""GRPO on PyTorch Lightning: a larger group takes longer, not more memory.

The pieces: :class:`lit_grpo.module.GRPOModule` holds the policy and its objective,
:class:`lit_grpo.data.PromptDataModule` produces prompts, and ``lit_grpo.callbacks`` do rollouts, weight sync and
monitoring. ``python -m lit_grpo fit --config ...`` puts them together, and so does :func:`lit_grpo.train`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_grpo.process.threads import prepare

if TYPE_CHECKING:
    from lit_grpo.training import train as train

__version__ = "0.1.0"
prepare()  # before torch is imported, which reads once how its threads are to wait

if not (Path(__file__).parent / "callbacks").is_dir():  # in a checkout they stand at its top
    __path__.append(str(Path(__file__).parents[1]))


def __getattr__(name: str) -> Any:
    """Import what trains once it is asked for: most of the time of an import goes there."""
    if name != "train":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lit_grpo.training import train

    return train
