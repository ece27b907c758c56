"""DAPO's dynamic sampling (arXiv 2503.14476): a prompt in place of each that all completions pass or none does.

A group stays if ``0 < |{o : o is right}| < G`` (equation 11; ``filter_groups.metric=acc`` of verl's recipe, as the DAPO
scripts in Kwai-Klear/RLEP at c15e5b4 run it). Penalties such as that for length do not count. The paper samples until a
batch is full of such groups; ``most`` bounds that. Its loss and its clipping are recipes of ``model.objective``.
"""

from __future__ import annotations

from lit_grpo.budgets.allocation import Replacement

PLUGINS = {"replace_flat": Replacement()}
