"""The load-balancing loss of mixtures of experts over the global batch (arXiv 2501.11873), and not by micro-batch.

``coefficient E sum_e f_e P_e`` (Switch Transformer, arXiv 2101.03961, eq. 4 to 6, in the form of transformers'
``load_balancing_loss_func``, which pools the layers): E is the number of experts, ``f_e`` the choices of expert e for
each token, of all k choices of a token in a layer, and ``P_e`` its mean probability. It is smallest, k, where experts
are chosen equally often. ``f_e`` has no gradient.

``f_e`` is of all tokens of the optimizer step, on all ranks, so that the loss does not depend on how the step is cut
into micro-batches, where a loss by micro-batch would demand balance within each. It must be known before the first
backward pass. Counts of the step before would be of another batch; so one forward pass without gradient counts first,
about a third of an update's work. A token counts once: the prompt once for all completions that share it, and a
completion whose advantage is 0 does not go through the policy, and is not counted. What completions begin
with in common counts once in each micro-batch that has it.

RL seldom needs it: the policy comes balanced, and its router is best left as it is. It is for runs in which
``router/loss`` rises, which this plug-in logs at any ``coefficient``.

Example:
    ``rollout.plugins: [{router_loss: {coefficient: 0.001}}]``
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lit_grpo.limits import NotNegative
from lit_grpo.plugins import Plugin, RunFacts
from lit_grpo.update.plugin import Term

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lit_grpo.update.step import Step


@dataclass
class RouterLoss(Plugin):
    """Keeps experts equally busy, over the tokens of each optimizer step on all ranks."""

    writes: ClassVar[frozenset[str]] = frozenset({"term"})
    needs: ClassVar[frozenset[str]] = frozenset({"all_ranks", "own_rows", "fixed_token_budget"})

    coefficient: NotNegative = 0.001
    """Weight of the term in the loss; 0 only logs it. Qwen3-MoE's pre-training has 0.001."""

    def check(self, run: RunFacts) -> None:
        if run.policy is not None:
            Routers(run.policy)

    def on_minibatch(self, step: Step) -> None:
        routers = Routers(step.policy)
        sums_3E = torch.zeros((3, 1), dtype=torch.float64)

        def count(forward: Callable[[], object], weight: float) -> None:
            nonlocal sums_3E
            with routers.watching():
                forward()
            for probs_TE in routers.probabilities() if weight else ():
                chosen_TE = torch.zeros_like(probs_TE).scatter_(1, probs_TE.topk(routers.top_k, -1).indices, 1.0)
                rows_E = torch.full_like(probs_TE[:1].sum(0), len(probs_TE))
                sums_3E = sums_3E + torch.stack([chosen_TE.sum(0), probs_TE.sum(0), rows_E]).double().cpu()

        step.visit(count)
        parts = step.ranks.gather(sums_3E)
        chosen_E, probs_E, rows_E = sum(parts[1:], parts[0])
        rows = max(float(rows_E.max()), 1.0)
        frequencies_E = chosen_E / rows
        value = len(frequencies_E) * float((frequencies_E * probs_E / rows).sum())
        step["term"] = RouterTerm(routers, frequencies_E * (self.coefficient * len(frequencies_E) / rows), value)


class RouterTerm(Term):
    """The loss of one step: linear in the probabilities, since what an expert's counts is known.

    Args:
        routers: Routers of the policy's experts, whose probabilities the term is computed from.
        slopes_E: ``coefficient E f_e / tokens``, float64.
        value: The loss, not yet times the coefficient.
    """

    def __init__(self, routers: Routers, slopes_E: torch.Tensor, value: float) -> None:
        self.metrics: Mapping[str, float] = {"router/loss": value}
        self._routers, self._slopes_E = routers, slopes_E

    def watching(self) -> Any:
        return self._routers.watching()

    def added_to(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        for probs_TE in self._routers.probabilities():
            slopes_E = self._slopes_E.to(device=probs_TE.device, dtype=probs_TE.dtype)
            loss = loss + weight * (probs_TE.sum(0) * slopes_E).sum()
        self._routers.logits.clear()
        return loss


class Routers:
    """The routers of a policy, which tells as transformers does where they are, and the logits that each gave last."""

    def __init__(self, policy: PreTrainedModel) -> None:
        recorded: list[Any] = [getattr(module, "_can_record_outputs", None) or {} for module in policy.modules()]
        recorder: Any = next((each["router_logits"] for each in recorded if "router_logits" in each), None)
        top_k = getattr(policy.config.get_text_config(), "num_experts_per_tok", None)
        if recorder is None or top_k is None:
            raise ValueError(
                f"it needs the logits of routers, which {type(policy).__name__} does not tell; leave router_loss out."
            )
        kind, self._index = getattr(recorder, "target_class", recorder), getattr(recorder, "index", 0)
        self._modules = [module for module in policy.modules() if isinstance(module, kind)]
        self.top_k: int = top_k
        self.logits: dict[torch.nn.Module, torch.Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the logits of the last call of each: that of the row, after those of what it carries."""

        def keep(module: torch.nn.Module, _: object, output: Any) -> None:
            self.logits[module] = output[self._index] if isinstance(output, tuple) else output

        handles = [module.register_forward_hook(keep) for module in self._modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def probabilities(self) -> Iterator[torch.Tensor]:
        """Yield for each router the probabilities (T, E) of the tokens of the row."""
        for logits_TE in self.logits.values():
            yield logits_TE.flatten(0, -2).float().softmax(-1)


PLUGINS = {"router_loss": RouterLoss()}
