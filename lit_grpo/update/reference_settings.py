"""Where the KL term's reference lives, and whether it moves."""

from __future__ import annotations

from dataclasses import dataclass

SYNC_STEPS = 512


@dataclass(frozen=True)
class ReferenceSettings:
    """The policy that the KL term holds on to; the first one, unless it moves.

    Args:
        offload: Keep its weights in host memory; the device has them while a batch's log-probs under the reference are
            computed, and not during the backward pass. Of no use on a CPU.
        mixup_alpha: Moves the reference: to ``mixup_alpha x policy + (1 - mixup_alpha) x reference``, every
            ``sync_steps`` optimizer steps (TR-DPO, arXiv 2404.09656; TRL's ``sync_ref_model`` and
            ``ref_model_mixup_alpha``, 0.6 there). In (0, 1]; 1 takes the policy as it is.
        sync_steps: Optimizer steps from one move to the next.
    """

    offload: bool = False
    mixup_alpha: float | None = None
    sync_steps: int = SYNC_STEPS

    def __post_init__(self) -> None:
        if self.mixup_alpha is not None and not 0 < self.mixup_alpha <= 1:
            raise ValueError(
                f"reference.mixup_alpha must be in (0, 1], not {self.mixup_alpha}; leave it out for a fixed reference."
            )
        if self.sync_steps < 1:
            raise ValueError(f"reference.sync_steps must be at least 1, not {self.sync_steps}.")
        if self.mixup_alpha is None and self.sync_steps != SYNC_STEPS:
            raise ValueError(
                f"reference.sync_steps is {self.sync_steps}, but the reference does not move; set "
                "reference.mixup_alpha, such as 0.6."
            )

    def check(self, beta: float, has_adapters: bool) -> None:
        """Refuse settings of a reference that there is not.

        Args:
            beta: Weight of the KL term.
            has_adapters: Whether adapters are trained instead of the policy's own weights.

        Raises:
            ValueError: A reference is to be offloaded or moved that takes no part, or is part of the policy.
        """
        if self == ReferenceSettings():
            return
        name, value = ("offload", True) if self.offload else ("mixup_alpha", self.mixup_alpha)
        if beta == 0:
            raise ValueError(
                f"reference.{name} is {value}, but objective.kl.beta is 0, so there is no reference; set beta above 0."
            )
        if has_adapters:
            raise ValueError(
                f"reference.{name} is {value}, but with lora the reference is the policy without its adapters, which "
                f"takes no memory and cannot move; leave reference.{name} out."
            )
