"""GRPO on PyTorch Lightning, with groups limited by time and never by memory.

The pieces: :class:`lit_grpo.module.GRPOModule` holds the policy and its objective,
:class:`lit_grpo.data.PromptDataModule` produces prompts, and ``lit_grpo.callbacks`` do rollouts, weight sync and
monitoring. ``python -m lit_grpo fit --config ...`` puts them together.
"""

from pathlib import Path

__version__ = "0.1.0"

if not (Path(__file__).parent / "callbacks").is_dir():  # in a checkout they stand at its top
    __path__.append(str(Path(__file__).parents[1]))
