"""The plug-in ``agent``: a user's agent, as it is, that talks to the policy over HTTP."""

from lit_grpo.environments.agent.plugin import Agent

__all__ = ["Agent"]
