"""GRPO on PyTorch Lightning, with groups limited by time and never by memory.

The pieces: :class:`lit_grpo.module.GRPOModule` holds the policy and its objective,
:class:`lit_grpo.data.PromptDataModule` produces prompts, and the callbacks of the top-level package
``callbacks`` do rollouts, weight sync and monitoring. ``python -m lit_grpo fit --config ...`` puts
them together.
"""

__version__ = "0.1.0"
