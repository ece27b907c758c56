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

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.functional import pad

from lit_grpo.limits import Positive
from lit_grpo.plugins import GroupBatch, Plugin, RunFacts
from lit_grpo.policy.architecture.decoder import decoder_of
from lit_grpo.policy.architecture.heads import MORE_KEYS, prediction_head
from lit_grpo.update.logprobs.linear_head import LinearHead, linear_head, linear_logprobs
from lit_grpo.update.objective.tokens import Tokens
from lit_grpo.update.plugin import Term, TrainingRun
from lit_grpo.update.prefix.layout import Stretch
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
            self._optimizer.load_state_dict(self._state)

    def on_minibatch(self, step: Step) -> None:
        self._temperature = next((each.completion.request.sampling.temperature for each in step.rollouts), 1.0) or 1.0
        self._sums = torch.zeros(2, device=step.policy.device)  # of tokens' losses and of tokens
        step["term"] = self._watched = _Watched(step.policy)

    def loss(self, tokens: Tokens) -> None:
        """Add the layer's own gradient from a micro-batch, of tokens that it has something to predict from."""
        hidden_1TD, inputs = self._watched.row
        whole: Sequence[Stretch] = inputs["shared_prefix"].stretches
        own = [number for number, each in enumerate(whole) if not each.carried]
        shared = SharedPrefix([whole[n]._replace(last=bisect(own, whole[n].last) - 1) for n in own])
        before_T, ends = torch.arange(hidden_1TD.shape[1]) - 1, list[int]()
        for stretch, parent in zip(shared.stretches, parents_of(shared.stretches), strict=True):
            ends.append(-1 if parent is None else ends[parent])
            if stretch.length:
                before_T[stretch.start] = ends[-1]
                ends[-1] = stretch.start + stretch.length - 1
        before_T = before_T.to(hidden_1TD.device)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
            return shared.attend("heads", query, key, pad(value, (0, MORE_KEYS)), None, scaling)[..., :-MORE_KEYS]

        hidden_1TD, is_first_1T = hidden_1TD.index_select(1, before_T.clamp(min=0)), before_T[None] < 0
        u_TD = self._layer(hidden_1TD, inputs["input_ids"], inputs["position_ids"], attend, is_first_1T)[0]
        is_there_X = pad(before_T >= 0, (0, len(whole) - len(own)))  # not what is carried, which stands after the row
        there_N = is_there_X[tokens.columns["source"]]
        source_N, target_ids_N = (tokens.columns[name][there_N] for name in ("source", "target_id"))
        head = linear_head(self._policy)
        assert head is not None
        bias_V = None if head.bias_V is None else head.bias_V.detach()
        fixed = LinearHead(head.weight_VD.detach(), bias_V, head.scale, head.cap)
        loss = -linear_logprobs(u_TD[source_N], target_ids_N, fixed, self._temperature)[0].sum()
        loss.backward()
        self._sums += torch.stack([loss.detach(), there_N.sum()])

    def on_optimizer_step(self, step: Step) -> None:
        """Step the layer's own optimizer along the mean gradient of all ranks' tokens."""
        loss, number = step.ranks.sum(self._sums).tolist()
        weights = [*self._layer.parameters()]
        for weight in weights:
            mine = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = ((mine if step.ranks.size == 1 else step.ranks.sum(mine)) / max(number, 1)).to(weight)
        if torch.nn.utils.clip_grad_norm_(weights, 1.0).isfinite() and number:
            self._optimizer.step()
            self._losses.append(loss / number)
        self._optimizer.zero_grad()

    def on_update_end(self, batch: GroupBatch) -> Mapping[str, float]:
        losses, self._losses = self._losses, []
        return {"train_mtp/loss": sum(losses) / len(losses)} if losses else {}

    def state_dict(self) -> dict[str, Any]:
        if "_optimizer" not in vars(self):  # nothing has been trained yet
            return self._state
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


class _Watched(Term):
    """Keeps what the policy's decoder has computed of the last micro-batch, and adds nothing to the policy's loss."""

    row: tuple[torch.Tensor, dict[str, Any]]  # the last hidden states, and what they were computed from

    def __init__(self, policy: PreTrainedModel) -> None:
        self._decoder = decoder_of(policy)

    @contextmanager
    def watching(self) -> Iterator[None]:
        def keep(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if "shared_prefix" in kwargs:  # else the model is tried on a few tokens
                self.row = output.last_hidden_state.detach(), kwargs

        handle = self._decoder.register_forward_hook(keep, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


PLUGINS = {"train_mtp": TrainMTP()}
