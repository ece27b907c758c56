"""An entropy bonus whose coefficient holds the entropy at a target (Skywork-OR1, arXiv 2505.22312)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from lit_grpo.compatibility import Requirement
from lit_grpo.limits import Limit, Positive, check_order
from lit_grpo.plugins import GroupBatch, Plugin, RunFacts
from lit_grpo.update.step import Step


@dataclass
class EntropyTarget(Plugin):
    """Raise and lower the coefficient of the entropy bonus from step to step; TRL's ``use_adaptive_entropy``.

    The coefficient grows by ``delta`` after a step whose mean entropy is at or below ``target``, and falls by ``delta``
    after one above. The bonus counts only while the last entropy was at or below. For example::

        rollout:
          plugins: [{entropy_target: {target: 0.2, max_coefficient: 0.05}}]

    Attributes:
        last_entropy: Mean entropy of a token in the last step; infinite before the first.
    """

    writes: ClassVar[frozenset[str]] = frozenset({"entropy_coefficient"})
    traits: ClassVar[frozenset[str]] = frozenset({"common"})

    target: Positive = 0.2
    """Target of the mean entropy per token, in nats."""
    coefficient: Annotated[float, Limit(finite=True)] = 0.0
    """Initial weight of the entropy bonus."""
    delta: Positive = 0.005
    """Change of the coefficient per step."""
    min_coefficient: Annotated[float, Limit()] = 0.0
    """Lower bound of the coefficient."""
    max_coefficient: Annotated[float, Limit()] = 1.0
    """Upper bound of the coefficient."""

    _by_token = True  # until a run says otherwise

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self, "min_coefficient", "coefficient")
        check_order(self, "coefficient", "max_coefficient")

    def check(self, run: RunFacts) -> None:
        self._by_token = run.normalization == "token"

    def requirement(self, name: str) -> Requirement:
        """The bonus is a mean over tokens: if the loss is none, its denominator has to be counted beforehand."""
        return Requirement(name, frozenset() if self._by_token else frozenset({"all_ranks"}))

    def setup(self) -> None:
        self._now, self.last_entropy = self.coefficient, math.inf

    def on_minibatch(self, step: Step) -> None:
        """Set the coefficient: 0 while the last entropy was above the target."""
        step["entropy_coefficient"] = 0.0 if self.last_entropy > self.target else self._now

    def on_optimizer_step(self, step: Step) -> None:
        """Follow the entropy of a step; one without tokens changes nothing."""
        if math.isnan(step.entropy):
            return
        if step.entropy <= self.target:
            self._now = min(self._now + self.delta, self.max_coefficient)
        else:
            self._now = max(self._now - self.delta, self.min_coefficient)
        self.last_entropy = step.entropy

    def on_update_end(self, batch: GroupBatch) -> dict[str, float]:
        return {"entropy_coefficient": self._now}

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self._now, "entropy": self.last_entropy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._now, self.last_entropy = state["coefficient"], state["entropy"]


PLUGINS = {"entropy_target": EntropyTarget()}
