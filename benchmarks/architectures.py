"""Every causal language model that the installed transformers knows: exact in all that a run does, or refused at once.

Of each family a small random model is saved, loaded as a policy, decoded with the slots, trained on, exported and
given adapters. What comes out is compared with plain Hugging Face forwards of one unpadded row at a time. A family is
*exact* where all of it agrees, *refused* where a sentence says before the first token why it is not, and anything else
is a defect.
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoModelForCausalLM

import lit_grpo
from benchmarks.report import Claim, Options, Row, finish, note, parse_options
from benchmarks.rollouts import roll_out
from lit_grpo.policy.adapters import LoraSettings, add_adapters
from lit_grpo.policy.architecture.support import check_policy
from lit_grpo.policy.loading import load_policy
from lit_grpo.policy.saving import export
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout.slots.generator import SlotGenerator
from lit_grpo.types import Completion, Prompt, Request, Rollout, RolloutGroup, SamplingParams
from lit_grpo.update.advantages.estimator import Advantages
from lit_grpo.update.learner import Learner
from lit_grpo.update.learner_settings import LearnerSettings
from lit_grpo.update.objective.objective import Objective
from lit_grpo.update.prefix.support import prefix_refusal
from scripts.make_tiny import make_tokenizer
from tests.doubles.small_models import families, small_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LIMITS = {"sampled": 1e-5, "trained": 1e-5, "gradient": 1e-5, "exported": 1e-6, "adapted": 1e-5}
"""The most that log-probs (nats) and gradients (a share of their norm) may be off."""
PROMPTS = [Prompt("short", (7, 8, 9), ""), Prompt("long", tuple(4 + i * 7 % 80 for i in range(13)), "")]
SAMPLING = SamplingParams(max_tokens=16)
GROUP = 3
QUICK = ("bert", "gemma2", "gemma4_text", "gpt2", "gpt_oss", "granite", "llama", "llama4_text", "mamba", "qwen3_moe")
ONLY_TRAINING = ("reformer",)
"""Families whose gradient exists in training mode alone; their dropout is 0 here."""


class Refused(Exception):
    """A sentence of ours that says what cannot be had."""


def judge(family: str, folder: Path, slack: float = 1.0) -> Row:
    """Take one family through all that a run does; return its row of the table.

    Args:
        family: The name that transformers gives the family, as ``qwen3_moe``.
        folder: An empty folder for its policy and exports.
        slack: What the limits are multiplied by; processors round differently.
    """
    row: Row = {"family": family, "outcome": "", "slots": "", "prefix": "", "detail": ""}
    row |= dict.fromkeys(LIMITS, "")
    try:
        model = small_model(family)
    except Exception as error:
        return row | {"outcome": "not built", "detail": _line(error)}
    try:
        _judge(row, model, folder, slack)
        row["outcome"] = "exact"
    except Refused as refusal:
        row |= {"outcome": "refused", "detail": str(refusal)}
    except AssertionError as mismatch:
        row |= {"outcome": "mismatch", "detail": str(mismatch)}
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        row |= {
            "outcome": "traceback",
            "detail": f"{type(error).__name__}: {_line(error)} ({Path(frame.filename).name})",
        }
    return {
        name: value.replace(str(folder), "FOLDER") if isinstance(value, str) else value for name, value in row.items()
    }


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _or_refused(call: Callable[[], Any]) -> Any:
    """Call, and tell our own refusals from other errors: they are raised here and not in a library."""
    try:
        return call()
    except ValueError as error:
        raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if raised.is_relative_to(Path(lit_grpo.__file__).parent):
            raise Refused(str(error)) from error
        raise


def _judge(row: Row, model: PreTrainedModel, folder: Path, slack: float) -> None:
    tokenizer = make_tokenizer()
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")

    def load() -> PreTrainedModel:
        policy = load_policy(str(folder / "policy"))
        check_policy(policy)
        return policy

    policy = _or_refused(load)
    plain = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32).eval()
    plain.train(row["family"] in ONLY_TRAINING)
    if plain.config._attn_implementation == "sdpa":
        plain.set_attn_implementation("eager")  # it leaves out nothing, such as caps and sinks
    row["exported"] = _exported(policy, tokenizer, folder)
    try:
        adapted = load_policy(str(folder / "policy"))
        torch.manual_seed(0)  # of the adapters
        _or_refused(lambda: add_adapters(adapted, LoraSettings(r=4)))
        row["adapted"] = _adapted(policy, adapted, tokenizer, folder)
    except Refused as refusal:
        row["adapted"] = str(refusal)
    prefix = _or_refused(lambda: prefix_refusal(policy))
    row["prefix"] = "shared" if prefix is None else prefix
    groups = _sampled(row, policy, plain, tokenizer)
    _trained(row, policy, plain, groups, prefix is None)
    over = [f"{name} {row[name]:.2g}" for name, most in LIMITS.items() if not _is_within(row[name], slack * most)]
    assert not over, f"off by {', '.join(over)}"


def _is_within(value: str | int | float, most: float) -> bool:
    """Whether a figure is small enough; what has been refused has none."""
    return isinstance(value, str) or value <= most


def _logits(model: PreTrainedModel, ids_T: torch.Tensor) -> torch.Tensor:
    return cast(Any, model)(input_ids=ids_T[None], use_cache=False).logits[0]


def _gap(one: PreTrainedModel, other: PreTrainedModel) -> float:
    """Largest difference of log-probs over a few rows, computed in float64 where the model's operators know it."""
    try:
        return _largest_gap(_in_float64(one), _in_float64(other))
    except RuntimeError:  # NotImplementedError too
        return _largest_gap(one, other)


def _in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose experts, if any, are computed by the implementation that knows float64."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    return exact


def _largest_gap(one: PreTrainedModel, other: PreTrainedModel) -> float:
    gaps = []
    with torch.no_grad():
        for prompt in PROMPTS:
            ids_T = torch.tensor(prompt.token_ids)
            gaps.append(
                (_logits(one.eval(), ids_T).log_softmax(-1) - _logits(other.eval(), ids_T).log_softmax(-1)).abs().max()
            )
    return float(max(gaps))


def _exported(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> float:
    export(policy, tokenizer, folder / "export")
    return _gap(policy, load_policy(str(folder / "export")))


def _adapted(
    policy: PreTrainedModel, adapted: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> float:
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in (each for each in adapted.parameters() if each.requires_grad):
            weight.add_(torch.randn(weight.shape, generator=draw), alpha=0.03)
    export(adapted, tokenizer, folder / "adapted")
    merged = load_policy(str(folder / "adapted"))
    assert _gap(policy, merged) > 1e-3, "adapters change nothing"
    return _gap(adapted, merged)


def _sampled(
    row: Row, policy: PreTrainedModel, plain: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[RolloutGroup]:
    """Sample with the slots; where they refuse the model, as another generator would."""
    generator = SlotGenerator(4)
    try:
        _or_refused(lambda: generator.start(PolicySpec(policy, tokenizer)))
    except Refused as refusal:
        row["slots"] = str(refusal)
        return [RolloutGroup(prompt, [_drawn(plain, prompt, sample) for sample in range(GROUP)]) for prompt in PROMPTS]
    generator.load_weights(policy.named_parameters(), 0)
    row["slots"] = "decode"
    groups, _ = roll_out(generator, PROMPTS, GROUP, SAMPLING)
    generator.close()
    gaps = [
        (rollout.completion.logprobs_T - logprobs(plain, group.prompt, rollout.completion).detach()).abs().max()
        for group in groups
        for rollout in group.rollouts
    ]
    row["sampled"] = float(max(gaps))
    return list(groups)


def _drawn(plain: PreTrainedModel, prompt: Prompt, sample: int) -> Rollout:
    draw = torch.Generator().manual_seed(sample)
    tokens_T = torch.randint(4, 80, (8 + sample,), generator=draw)
    request = Request(prompt, (sample,), SAMPLING)
    completion = Completion(request, tokens_T, torch.zeros(len(tokens_T)), torch.zeros_like(tokens_T), "stop", "")
    completion.logprobs_T = logprobs(plain, prompt, completion).detach()
    return Rollout(prompt, completion)


def logprobs(plain: PreTrainedModel, prompt: Prompt, completion: Completion) -> torch.Tensor:
    """Of a completion's tokens, by a plain forward of prompt and completion."""
    ids_T = torch.cat([torch.tensor(prompt.token_ids), completion.token_ids_T])
    logits_TV = _logits(plain, ids_T)[len(prompt.token_ids) - 1 : -1]
    return logits_TV.log_softmax(-1).gather(-1, completion.token_ids_T[:, None]).squeeze(-1)


class _Gradient:
    """Takes the place of an optimizer and changes nothing."""

    optimizer: torch.optim.Optimizer

    def __init__(self, policy: PreTrainedModel) -> None:
        self.policy_version, self._policy = 0, policy
        self.optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        self.gradients: dict[str, torch.Tensor] = {}

    def add_gradient(self, compute_loss: Callable[[], torch.Tensor], exchange: bool) -> None:
        compute_loss().backward()

    def take_step(self, scale: float = 1.0) -> float:
        weights = self._policy.named_parameters()
        self.gradients = {name: weight.grad.clone() for name, weight in weights if weight.grad is not None}
        return 0.0


def _trained(
    row: Row, policy: PreTrainedModel, plain: PreTrainedModel, groups: Sequence[RolloutGroup], shares: bool
) -> None:
    """Compare the learner's log-probs and gradient with those of plain forwards."""
    for group in groups:
        for number, rollout in enumerate(group.rollouts):
            rollout.reward = float(number)
            rollout.rewards = {"reward": rollout.reward}
    settings = LearnerSettings(Objective(), Advantages(), {"reward": 1.0}, 1.0, SAMPLING.max_tokens, max_grad_norm=0.0)
    settings.shares_prefix = shares
    settings.max_tokens_per_micro_batch = 64
    steps = _Gradient(policy)
    learner = Learner(policy.train(), steps, settings)
    policy.zero_grad()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    measured = learner.passes.by_completion(rollouts, "logprobs")
    learner.learn(groups)
    plain.zero_grad()
    num_tokens = sum(rollout.completion.num_tokens for rollout in rollouts)
    gaps = []
    for rollout in rollouts:
        logprobs_T = logprobs(plain, rollout.prompt, rollout.completion)
        gaps.append(float((logprobs_T.detach() - measured[rollout.completion.request.key]).abs().max()))
        (-rollout.advantage * logprobs_T.sum() / num_tokens).backward()
    row["trained"] = max(gaps)
    expected = {name: weight.grad for name, weight in plain.named_parameters()}
    difference = total = 0.0
    for name, weight in policy.named_parameters():
        mine = steps.gradients.get(name, torch.zeros_like(weight))
        its = expected[name]
        its = torch.zeros_like(weight) if its is None else its
        difference, total = (
            difference + float((mine - its).double().square().sum()),
            total + float(its.double().square().sum()),
        )
    assert total > 0, "no gradient"
    row["gradient"] = (difference / total) ** 0.5


def sweep(names: Sequence[str]) -> list[Row]:
    """Return a row for each family."""
    rows = []
    for name in names:
        with (
            tempfile.TemporaryDirectory() as folder,
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            rows.append(judge(name, Path(folder)))
        note(" ".join(f"{value:.2g}" if isinstance(value, float) else str(value)[:300] for value in rows[-1].values()))
    return rows


def main(options: Options) -> int:
    """Judge all families."""
    rows = sweep(QUICK if options.quick else families())
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in ("exact", "refused", "not built")}
    defects = len(rows) - sum(counts.values())
    claims = [
        Claim("families that are exact or refused in a sentence", counts["exact"] + counts["refused"], ">=", 40),
        Claim("families with a wrong result or a traceback", defects, "<=", 0),
    ]
    settings: Row = {"vocabulary": 96, "rows": "2 prompts, 3 completions each", **counts}
    return finish("architectures", options, settings, rows, claims)


if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(main(parse_options(__doc__)))
