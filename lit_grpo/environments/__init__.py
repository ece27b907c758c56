"""Environments, tools and many turns: TRL's environments as they are, beside decoding, token by token.

The plug-in is :class:`lit_grpo.environments.plugin.Environments`; what an environment is says
:mod:`lit_grpo.environments.contract`. :class:`lit_grpo.environments.agent.Agent` is the one
for agents that ask over HTTP.
"""

from lit_grpo.environments.contract import EnvironmentFailed
from lit_grpo.environments.plugin import Environments

__all__ = ["EnvironmentFailed", "Environments"]
