"""Imitation of what tools and environments answered (ECHO, ``echo`` of prime-rl at 559b4477).

Test-time RL on trees is called ECHO too (arXiv 2602.02150), and has nothing to do with this: the plug-in ``echo_tree``.

Observed tokens get a weight ``w`` in the channel ``ce``, sampled tokens none::

    loss = loss_rl - w / n sum_t log pi(observed token t | tokens before it)

with ``n`` the number of observed tokens of the step, over all ranks. So the policy learns to predict what its calls
return, a model of its environments, from tokens that the update computes anyway. prime-rl has the same weight, 0.1.

Observed tokens of a completion whose earlier turns were rendered again for each turn (``Completion.contexts``) get no
weight: each turn has a row with a context of its own there, and an observed token would stand in several of them.
Observations with images get none either, because the placeholder of an image is no text that could be predicted.

Evidence: gradients equal those of the model's own forward pass in float64, in ``tests/test_echo.py``. A gain in reward
has not been shown here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lit_grpo.limits import Positive
from lit_grpo.plugins import Plugin
from lit_grpo.types import OBSERVED
from lit_grpo.update.plugin import Batch


@dataclass
class Echo(Plugin):
    """Imitates what tools and environments answered, with a small weight.

    Example::

        rollout:
          plugins: [environments, {echo: {weight: 0.1}}]
    """

    writes: ClassVar[frozenset[str]] = frozenset({"ce_weight"})
    needs: ClassVar[frozenset[str]] = frozenset({"turns"})

    weight: Positive = 0.1
    """Weight of the negative log-likelihood per observed token in the loss."""

    def on_batch(self, batch: Batch) -> None:
        for rollout in batch.rollouts:
            completion = rollout.completion
            if rollout.kept and completion.num_observed and not completion.contexts:
                weights_T = self.weight * (completion.versions_T == OBSERVED).float()
                for place, each in completion.pictures:
                    weights_T[place : place + each.num_tokens] = 0
                batch.set("ce_weight", rollout, weights_T)


PLUGINS = {"echo": Echo()}
