"""Training of the policy's own layer of multi-token prediction (MTP) beside the policy, so that its drafts stay good.

Loss of the layer, with ``u_i`` what it makes of the policy's last hidden state at token ``i - 1`` and of token ``i``::

    1 / n sum_i -log softmax(head(u_i) / temperature)[token i + 1]

over the n tokens of the step that the policy trains on: the cross-entropy of DeepSeek-V3 (arXiv 2412.19437, section
2.2) at depth 1, on what the policy has sampled itself. Hidden states, embedding and head get no gradient, and the layer
has an optimizer of its own, so that the policy's gradient, its norm and its steps are those without the plug-in.

Deviations: a prompt that another micro-batch has computed is not seen from the completions of this one.

Evidence: the policy's gradient is the same in every bit, and drafts are accepted more often, in
``tests/test_train_mtp.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.functional import pad

from lit_grpo.limits import Positive
from lit_grpo.plugins import GroupBatch, Plugin, RunFacts
from lit_grpo.policy.architecture.decoder import decoder_of
from lit_grpo.policy.architecture.heads import MORE_KEYS, PredictionHead, prediction_head
from lit_grpo.update.logprobs.linear_head import linear_head, linear_logprobs
from lit_grpo.update.objective.tokens import Tokens
from lit_grpo.update.plugin import Term, TrainingRun
from lit_grpo.update.prefix.recurrent import parents_of
from lit_grpo.update.prefix.sharing import SharedPrefix
from lit_grpo.update.step import Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class TrainMTP(Plugin):
    """Trains the policy's own heads, which ``model.generator.drafter: heads`` drafts with, on what the policy samples.

    Exports have the trained layer in the place of the base's.

    Example:
        ``rollout.plugins: [{train_mtp: {learning_rate: 1e-4}}]``
    """

    writes: ClassVar[frozenset[str]] = frozenset({"term"})
    needs: ClassVar[frozenset[str]] = frozenset({"all_ranks", "own_rows", "whole_completions", "unsharded_weights"})
    traits: ClassVar[frozenset[str]] = frozenset({"common"})

    learning_rate: Positive = 1e-4
    """Learning rate of the layer's own AdamW, without weight decay, after its gradient is clipped to norm 1."""

    def setup(self) -> None:
        self._watched: _Watched | None = None
        self._sums: list[torch.Tensor] = []  # of tokens' losses and of tokens, since the last step
        self._losses: list[float] = []
        self._state: dict[str, Any] = {}

    def check(self, run: RunFacts) -> None:
        if run.policy is not None:
            prediction_head(run.policy)
            if linear_head(run.policy) is None:
                raise ValueError(
                    "it needs the policy's output embedding as a plain linear layer; leave it out of model.lora."
                )

    def on_train_start(self, run: TrainingRun) -> None:
        self._policy, self._layer = run.policy, prediction_head(run.policy)
        self._layer.train_in(run.policy)
        self._optimizer = torch.optim.AdamW(self._layer.parameters(), self.learning_rate, weight_decay=0.0)
        if self._state:
            self._layer.load_state_dict(self._state["layer"])
            self._optimizer.load_state_dict(self._state["optimizer"])

    def on_minibatch(self, step: Step) -> None:
        temperature = next((each.completion.request.sampling.temperature for each in step.rollouts), 1.0)
        self._watched = step["term"] = _Watched(step.policy, temperature or 1.0)

    def loss(self, tokens: Tokens) -> None:
        """Add the layer's own gradient from a micro-batch; nothing of it reaches the policy's."""
        if self._watched is None or not len(tokens.columns["source"]):
            return
        logprobs_N = self._watched.logprobs(self._layer, tokens.columns["source"], tokens.columns["target_id"])
        if len(logprobs_N):
            total = -logprobs_N.sum()
            total.backward()
            self._sums.append(torch.stack([total.detach(), total.new_tensor(len(logprobs_N))]))

    def on_optimizer_step(self, step: Step) -> None:
        """Step the layer's own optimizer along the mean gradient of all ranks' tokens."""
        weights = [*self._layer.parameters()]
        own = [torch.zeros(2, device=weights[0].device), *self._sums]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in weights]
        sums = step.ranks.sum(torch.cat([torch.stack(own).sum(0), *(each.flatten() for each in gradients)]))
        loss, number = sums[:2].tolist()
        self._sums = []
        if number and sums.isfinite().all():
            parts = (
                (sums[2:] / number).to(weights[0].device, weights[0].dtype).split([each.numel() for each in weights])
            )
            for weight, part in zip(weights, parts, strict=True):
                weight.grad = part.view_as(weight)
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            self._optimizer.step()
            self._losses.append(loss / number)
        self._optimizer.zero_grad()

    def on_update_end(self, batch: GroupBatch) -> Mapping[str, float]:
        losses, self._losses = self._losses, []
        return {"train_mtp/loss": sum(losses) / len(losses)} if losses else {}

    def state_dict(self) -> dict[str, Any]:
        if "_optimizer" not in vars(self):  # nothing has been trained yet
            return self._state
        return {"layer": self._layer.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


class _Watched(Term):
    """Keeps what the policy's decoder has computed of the last micro-batch, and adds nothing to the policy's loss."""

    def __init__(self, policy: PreTrainedModel, temperature: float) -> None:
        self._policy, self._temperature = policy, temperature
        self._row: tuple[torch.Tensor, torch.Tensor, torch.Tensor, SharedPrefix] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        def keep(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if "shared_prefix" in kwargs:  # else the model is tried on a few tokens
                inputs = kwargs["input_ids"], kwargs["position_ids"], kwargs["shared_prefix"]
                self._row = (output.last_hidden_state.detach(), *inputs)

        handle = decoder_of(self._policy).register_forward_hook(keep, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def logprobs(self, layer: PredictionHead, source_N: torch.Tensor, target_ids_N: torch.Tensor) -> torch.Tensor:
        """Return the layer's log-probs of tokens of the row, of those that it has something to predict from.

        Args:
            layer: The layer of multi-token prediction.
            source_N: Place of each token's predecessor in the row.
            target_ids_N: Their ids.
        """
        assert self._row is not None, "models with such a layer share prompts"
        hidden_1TD, ids_1T, positions_1T, shared = self._row
        num_tokens, kept = ids_1T.shape[1], [number for number, each in enumerate(shared.stretches) if not each.carried]
        stretches = [
            shared.stretches[number]._replace(last=sum(other <= shared.stretches[number].last for other in kept) - 1)
            for number in kept
        ]
        before_T = torch.arange(num_tokens) - 1
        parents = parents_of(stretches)
        for own, parent in zip(stretches, parents, strict=True):
            while parent is not None and not stretches[parent].length:
                parent = parents[parent]
            if own.length:
                above = None if parent is None else stretches[parent]
                before_T[own.start] = -1 if above is None else above.start + above.length - 1
        before_T = before_T.to(ids_1T.device)
        is_first_T = before_T < 0
        alone = SharedPrefix(stretches)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
            return alone.attend("heads", query, key, pad(value, (0, MORE_KEYS)), None, scaling)[..., :-MORE_KEYS]

        hidden_1TD = hidden_1TD.index_select(1, before_T.clamp(min=0))
        u_TD = layer(hidden_1TD, ids_1T, positions_1T, attend, is_first_T[None])[0]
        there_N = (source_N < num_tokens) & ~is_first_T[source_N.clamp(max=num_tokens - 1)]
        head = linear_head(self._policy)
        assert head is not None
        bias = None if head.bias_V is None else head.bias_V.detach()
        head = replace(head, weight_VD=head.weight_VD.detach(), bias_V=bias, keeps_gradient=False)
        return linear_logprobs(u_TD[source_N[there_N]], target_ids_N[there_N], head, self._temperature)[0]


PLUGINS = {"train_mtp": TrainMTP()}
