"""Turns that began in the same state are compared with each other (GiGPO, arXiv 2505.10978, eq. 3 and 6 to 8).

A turn has ``A = A_episode + weight A_step``. A_episode is the advantage of its rollout, as the run's estimator makes
it (the paper's is ``grpo``, scaled or with ``scale: none``). A_step is the turn's return less the mean return of all
turns, of any completion of the same visit of the prompt, that began in the same state; a state that was seen once gives
0. The return is ``sum_k gamma**k r_(t + k)`` of what the turns earned by themselves (``Rollout.turn_rewards``).

The state of a turn is what was observed right before it, for the first turn the prompt. The paper's is the
environment's. Advantages equal those of the authors' code (langfengQ/DrMAS at 3b556f2). Their earlier code
(langfengQ/verl-agent at 20bd331) counts an episode by its steps where its mean is taken, and the paper, as here, once.

Evidence: worked examples, in ``tests/test_gigpo.py``; and the game of ``configs/catch.yaml``, three seeds: 80% of the
balls caught after 16 updates, with GRPO 81%, within the range of seeds (``python -m benchmarks.learning
catch_credit``). It has not been shown to help.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from lit_grpo.limits import Limit, NotNegative
from lit_grpo.methods.shared.turns import Turn, compare_turns, discounted_returns, rewards_of_turns
from lit_grpo.plugins import Plugin
from lit_grpo.types import Completion, Rollout
from lit_grpo.update.plugin import Batch


@dataclass
class GiGPO(Plugin):
    """Compares turns that began in the same state."""

    writes: ClassVar[frozenset[str]] = frozenset({"turn_advantage"})
    needs: ClassVar[frozenset[str]] = frozenset({"whole_groups", "turns"})  # one turn's advantage would count twice

    weight: NotNegative = 1.0
    """Weight of a turn's own advantage beside that of its rollout."""
    gamma: Annotated[float, Limit(ge=0, le=1)] = 0.95
    """Discount of the rewards of later turns in a turn's return, per turn in between."""
    scale: bool = False
    """Divide by the standard deviation of the turns that are compared (the paper's F_norm = std)."""

    def on_batch(self, batch: Batch) -> None:
        compare_turns(batch, self._returns, self.scale, self.weight)

    def _returns(self, rollout: Rollout) -> Iterable[Turn]:
        returns = discounted_returns(rewards_of_turns(rollout), self.gamma)
        return zip(states(rollout.completion), returns, strict=True)


def states(completion: Completion) -> list[tuple[int, ...]]:
    """Return what was observed right before each turn of a completion, by its contents; nothing before the first."""
    token_ids: list[int] = completion.contents.tolist()
    found: list[tuple[int, ...]] = []
    begin, observed, in_turn = 0, (), False
    for segment in completion.segments:
        end = begin + segment.num_tokens
        if segment.version is None:
            observed = (*observed, *token_ids[begin:end]) if not in_turn else tuple(token_ids[begin:end])
        elif not in_turn:
            found.append(observed)
        begin, in_turn = end, segment.version is not None
    return found


PLUGINS = {"gigpo": GiGPO()}
