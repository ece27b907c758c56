"""Environments, tools and many turns: TRL's environments as they are, beside decoding, token by token.

The plug-in is :class:`lit_grpo.environments.plugin.Environments`; what an environment is says
:mod:`lit_grpo.environments.contract`.
"""

from lit_grpo.environments.contract import EnvironmentFailed
from lit_grpo.environments.plugin import Environments

__all__ = ["EnvironmentFailed", "Environments"]
