"""DAPO's dynamic sampling (arXiv 2503.14476): another prompt in place of a group whose rewards are all equal.

The paper samples until a batch is full of groups with signal; ``most`` bounds that. Its loss and its clipping are
recipes of ``model.objective``.
"""

from __future__ import annotations

from lit_grpo.budgets.allocation import Replacement

PLUGINS = {"replace_flat": Replacement()}
