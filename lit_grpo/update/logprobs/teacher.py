"""The teacher: a frozen model, or the policy itself, whose log-probs of the policy's tokens methods learn from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import torch

from lit_grpo.compatibility import SHARDS, Requirement, check_together
from lit_grpo.limits import Limit, Positive, check_fields
from lit_grpo.policy.architecture.decoder import context_length, token_logits
from lit_grpo.policy.loading import LoadedPolicy, embeddings, load_policy, load_tokenizer
from lit_grpo.policy.sharding import is_sharded
from lit_grpo.types import AllGather, Key, Rollout
from lit_grpo.update.logprobs.forward import LOGITS_PER_CHUNK, head_logprobs
from lit_grpo.update.logprobs.reference import AdapterFreeReference, Reference, ReferenceSettings, make_reference
from lit_grpo.update.plugin import Measure, TeacherScores

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class TeacherSettings:
    """Settings of the teacher, for methods that learn from its log-probs."""

    policy: str
    """Name, folder, GGUF file or Hugging Face id of a model or adapter with the vocabulary of the policy. Or the policy
    itself: ``base`` as it is when the run starts, ``live`` as it is at each batch, ``average`` a moving average of its
    weights.
    """
    dtype: Literal["float32", "bfloat16", "nf4"] = "float32"
    """Data type of the teacher's weights; ``nf4`` keeps its linear layers in four bits and needs bitsandbytes."""
    offload: bool = False
    """Keep the teacher's weights in host memory. The device has them only while a batch is scored, not during the
    backward pass. Of no use on a CPU.
    """
    temperature: Positive = 1.0
    """Temperature that divides the teacher's logits, whatever the temperature of sampling is."""
    average_rate: Annotated[float, Limit(gt=0, le=1)] = 0.05
    """Fraction of the policy in the moving average after each optimizer step, for ``average``."""

    def __post_init__(self) -> None:
        check_fields(self, "model.teacher.")
        foreign = self.policy not in SELF
        for name, differs, fits in (
            ("dtype", self.dtype != "float32", foreign),
            ("offload", self.offload, foreign or self.policy != "live"),
            ("average_rate", self.average_rate != 0.05, self.policy == "average"),
        ):
            if differs and not fits:
                raise ValueError(
                    f"model.teacher.{name} has no effect with model.teacher.policy {self.policy!r}; leave it out."
                )


SELF = ("base", "live", "average")
"""Teachers that are the policy itself."""


class ModelTeacher:
    """Scores the tokens of rollouts, packed as in the update, each prompt once.

    Args:
        settings: What the user has set.
        vocab_size: Number of tokens that the policy knows: no other is among the likeliest.
        lend: Makes a context that gives the model, on its device.
        weights: Of a moving average, by the names of the policy's parameters; empty for a teacher that does not move.
    """

    def __init__(
        self,
        settings: TeacherSettings,
        vocab_size: int,
        lend: Callable[[], AbstractContextManager[PreTrainedModel]],
        weights: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> None:
        self.settings, self.vocab_size, self.lend, self.weights = settings, vocab_size, lend, weights

    @torch.no_grad()
    def follow(self, policy: PreTrainedModel) -> None:
        """Move a moving average towards the policy, after an optimizer step; other teachers stay as they are."""
        if mine := self.weights():
            rate, its = self.settings.average_rate, dict(policy.named_parameters())
            for name, weight in mine.items():
                weight.mul_(1 - rate).add_(its[name].to(weight.device), alpha=rate)

    def score(
        self, measure: Measure, rollouts: Sequence[Rollout], all_gather: AllGather, top_k: int = 0
    ) -> Mapping[Key, TeacherScores]:
        """Return by completion what the model says of its tokens that are trained on."""
        temperature, vocab_size = self.settings.temperature, self.vocab_size

        def of_hidden(
            model: PreTrainedModel, hidden_nD: torch.Tensor, target_ids_n: torch.Tensor, _: torch.Tensor
        ) -> torch.Tensor:
            logprobs_n, entropy_n = head_logprobs(model, hidden_nD, target_ids_n, temperature)
            columns = [logprobs_n[:, None], entropy_n[:, None]]
            if top_k:
                chunks = hidden_nD.split(max(1, LOGITS_PER_CHUNK // vocab_size))
                tops = [
                    torch.log_softmax(token_logits(model, each) / temperature, -1)[:, :vocab_size].topk(top_k)
                    for each in chunks
                ]
                columns += [torch.cat([top.indices.to(logprobs_n.dtype) for top in tops])]  # exact below 2^24
                columns += [torch.cat([top.values for top in tops])]
            return torch.cat(columns, 1)

        problem, values = self._unknown(rollouts), dict[Key, torch.Tensor]()
        if not any(all_gather(problem)):
            values = measure(rollouts, of_hidden, self.lend)
            problem = _not_finite(rollouts, values)
        for sentence in filter(None, all_gather(problem)):
            raise ValueError(sentence)
        scores = dict[Key, TeacherScores]()
        for key, values_TX in values.items():
            ids_TK, top_logprobs_TK = values_TX[:, 2 : 2 + top_k].long(), values_TX[:, 2 + top_k :]
            scores[key] = TeacherScores(values_TX[:, 0], values_TX[:, 1], ids_TK, top_logprobs_TK)
        return scores

    def _unknown(self, rollouts: Sequence[Rollout]) -> str:
        """Say which token of rollouts the teacher has no embedding for; empty if it knows all of them."""
        with self.lend() as model:
            known = len(embeddings(model)[0])
        for rollout in rollouts if known < self.vocab_size else ():
            largest = max(*rollout.prompt.token_ids, int(rollout.completion.token_ids_T.max()))
            if largest >= known:
                return (
                    f"Sample {rollout.completion.request.path} of prompt {rollout.prompt.prompt_id!r} has token "
                    f"{largest}, and the teacher {self.settings.policy!r} knows {known} tokens; take a teacher that "
                    "knows all tokens of the policy."
                )
        return ""

    def check_context(self, longest_row: int) -> None:
        """Check that a prompt and its completion fit into the teacher's context.

        Args:
            longest_row: The most tokens of both together.

        Raises:
            ValueError: They do not.
        """
        with self.lend() as model:
            most = context_length(model)
        if longest_row > most:
            raise ValueError(
                f"model.teacher.policy {self.settings.policy!r} has a context of {most} tokens, and a prompt with its "
                f"completion may take {longest_row}; lower model.sampling.max_tokens, or take another teacher."
            )


def _not_finite(rollouts: Sequence[Rollout], values: Mapping[Key, torch.Tensor]) -> str:
    for rollout in rollouts:
        values_TX = values.get(rollout.completion.request.key)
        if values_TX is not None and not (finite_T := values_TX[:, 0].isfinite()).all():
            place = int((~finite_T).int().argmax())
            return (
                f"The teacher gives sample {rollout.completion.request.path} of prompt {rollout.prompt.prompt_id!r} "
                f"the log-prob {float(values_TX[place, 0])} at its trained token {place}; take a teacher, or a "
                "model.teacher.dtype, whose log-probs are finite. Nothing was learnt from the batch."
            )
    return ""


def check_vocabulary(teacher: str, own: PreTrainedTokenizerBase, its: PreTrainedTokenizerBase) -> None:
    """Check that the teacher's tokenizer gives every token the id that the policy's gives it.

    Raises:
        ValueError: A token has another id, or is known to one of the two alone; the first by the policy's ids is named.
    """
    mine, theirs = own.get_vocab(), its.get_vocab()
    if mine == theirs:
        return
    for token, number in sorted(mine.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            has = "does not know it" if token not in theirs else f"gives it the id {theirs[token]}"
            raise ValueError(
                f"model.teacher.policy {teacher!r} has another vocabulary than the policy: token {token!r} "
                f"has the id {number}, and the teacher {has}; take a teacher of the same family."
            )
    token = min(theirs.keys() - mine.keys(), key=theirs.__getitem__)
    raise ValueError(
        f"model.teacher.policy {teacher!r} has another vocabulary than the policy, which does not know its "
        f"token {token!r} (id {theirs[token]}); take a teacher of the same family."
    )


def make_teacher(
    settings: TeacherSettings,
    policy: PreTrainedModel,
    source: str | LoadedPolicy,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    began: Literal["full", "bare", "adapter"],
) -> ModelTeacher:
    """Load a teacher, once its vocabulary has been compared with the policy's.

    Args:
        settings: What the user has set.
        policy: The policy, of which nothing has been trained yet; perhaps sharded.
        source: What it was loaded from.
        dtype: Of its weights.
        tokenizer: Its tokenizer.
        device: Where the teacher computes.
        began: What is trained, as for :func:`lit_grpo.update.logprobs.reference.make_reference`.

    Raises:
        ValueError: There is no such model, it has another vocabulary, or it cannot follow shards.
    """
    name, vocab_size = settings.policy, len(embeddings(policy)[0])
    if name == "live":
        return ModelTeacher(settings, vocab_size, partial(nullcontext, policy))
    if name not in SELF:
        check_vocabulary(name, tokenizer, load_tokenizer(name))
        is_nf4 = settings.dtype == "nf4"
        model = load_policy(name, "bfloat16" if is_nf4 else settings.dtype, is_nf4)
        return ModelTeacher(settings, vocab_size, Reference(model, device, ReferenceSettings(settings.offload)).lend)
    moves = name == "average"
    if moves and is_sharded(policy):
        needs = Requirement("model.teacher.policy average", frozenset({"unsharded_weights"}), remedy="take live")
        check_together([needs, SHARDS])
    began = "adapter" if moves and began == "bare" else began
    reference = make_reference(policy, source, dtype, device, ReferenceSettings(settings.offload), began)
    if not moves or isinstance(reference, AdapterFreeReference):
        return ModelTeacher(settings, vocab_size, reference.lend)
    return ModelTeacher(settings, vocab_size, reference.lend, reference.weights)
