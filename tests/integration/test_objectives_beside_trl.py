"""Every objective that TRL 1.16 has, beside TRL's own code, on ragged float64 inputs: loss and gradient.

TRL's side is ``GRPOTrainer._compute_loss`` itself, run on a light-weight stand-in for the trainer: the log-probs and
entropies that it asks its model for are tensors of ours, and accelerate is a single process that reduces nothing.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hand_made import make_step, make_tokens

from lit_grpo.methods.entropy_target import EntropyTarget
from lit_grpo.plugins import fresh
from lit_grpo.update.objective.corrections import Correction, correction_weights
from lit_grpo.update.objective.kl import KLTerm
from lit_grpo.update.objective.objective import EntropyBonus, Objective
from lit_grpo.update.objective.policy_loss import policy_loss
from lit_grpo.update.objective.tokens import StepTotals, entropy_threshold, spread

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")

MAX_TOKENS = 11


class Case:
    """Ragged completions as padded rows for TRL, and one after another for us."""

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random, dtype=torch.float64)

        self.lengths_C = torch.randint(1, MAX_TOKENS + 1, (7,), generator=random)
        self.mask_CT = (torch.arange(int(self.lengths_C.max())) < self.lengths_C[:, None]).long()
        rows, columns = self.mask_CT.shape
        self.old_CT = -normal(rows, columns).abs() - 0.1
        self.sampled_CT = self.old_CT + 0.25 * normal(rows, columns)
        self.logprobs_CT = self.old_CT + 0.4 * normal(rows, columns)
        self.reference_CT = self.old_CT + 0.5 * normal(rows, columns)
        self.entropy_CT = normal(rows, columns).abs()
        self.advantages_C = normal(rows)
        self.advantages_C[2] = 0.0

    def flat(self, values_CT: torch.Tensor) -> torch.Tensor:
        return values_CT[self.mask_CT.bool()]

    def totals(self, num_entropy_tokens: int = 0) -> StepTotals:
        return StepTotals(int(self.lengths_C.sum()), len(self.lengths_C), MAX_TOKENS, num_entropy_tokens)


def trl_loss(case: Case, correction: Correction | None = None, **settings: Any) -> tuple[torch.Tensor, ...]:
    """Loss and gradients by log-prob and entropy, of TRL's own code."""
    return trl_step(case, correction, **settings)[1]


def trl_step(case: Case, correction: Correction | None = None, **settings: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """The stand-in after the step; and loss and gradients by log-prob and entropy, of TRL's own code."""
    logprobs_CT, entropy_CT = case.logprobs_CT.clone().requires_grad_(), case.entropy_CT.clone().requires_grad_()
    corrected = {"use_vllm": correction is not None, "vllm_importance_sampling_correction": correction is not None}
    trainer = make_stand_in(logprobs_CT, entropy_CT, settings | corrected)
    loss = trainer._compute_loss(None, trl_inputs(case, correction))
    loss.backward()
    gradients = (torch.zeros_like(logprobs_CT) if g is None else g for g in (logprobs_CT.grad, entropy_CT.grad))
    return trainer, (loss.detach(), *(case.flat(gradient) for gradient in gradients))


TRAINER = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "beta": 0.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "_last_world_entropy": float("inf"),
    "_entropy_window_stats": None,
    "aux_loss_enabled": False,
    "max_completion_length": MAX_TOKENS,
    "current_gradient_accumulation_steps": 1,
}
ARGUMENTS = {
    "delta": None,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "entropy_target": 0.0,
    "entropy_coef_delta": 0.0,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "steps_per_generation": 1,
    "report_to": [],
}


def make_stand_in(logprobs_CT: torch.Tensor, entropy_CT: torch.Tensor, settings: dict[str, Any]) -> Any:
    """What ``_compute_loss`` reads of a trainer; settings are the trainer's own, or of its arguments."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    class StandIn(SimpleNamespace):
        get_off_policy_mask = staticmethod(GRPOTrainer.get_off_policy_mask)
        get_gamma_weights = staticmethod(GRPOTrainer.get_gamma_weights)
        get_high_entropy_mask = GRPOTrainer.get_high_entropy_mask
        _compute_loss = GRPOTrainer._compute_loss

        def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Any, Any, None]:
            return logprobs_CT, entropy_CT, None

    accelerator = SimpleNamespace(
        num_processes=1,
        is_main_process=True,
        sync_gradients=True,
        reduce=lambda tensor, reduction: tensor,
        gather=lambda tensor: tensor,
        pad_across_processes=lambda tensor, **_: tensor,
    )
    own = TRAINER | {name: value for name, value in settings.items() if name not in ARGUMENTS}
    return StandIn(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(**ARGUMENTS | {name: settings[name] for name in settings if name in ARGUMENTS}),
        accelerator=accelerator,
        state=SimpleNamespace(global_step=0),
        _entropy_bonus_enabled=own["entropy_coef"] != 0 or own["use_adaptive_entropy"],
        _metrics=defaultdict(lambda: defaultdict(list)),
        **own,
    )


def trl_inputs(case: Case, correction: Correction | None) -> dict[str, torch.Tensor]:
    """What TRL's generation and scoring would hand to the loss."""
    tokens = torch.zeros_like(case.mask_CT)
    inputs = {
        "prompt_ids": tokens[:, :1],
        "prompt_mask": torch.ones_like(tokens[:, :1]),
        "completion_ids": tokens,
        "completion_mask": case.mask_CT,
        "advantages": case.advantages_C,
        "num_items_in_batch": case.mask_CT.sum(),
        "old_per_token_logps": case.sampled_CT if correction is None else case.old_CT,
        "sampling_per_token_logps": case.sampled_CT,
        "ref_per_token_logps": case.reference_CT,
    }
    if correction is not None:
        inputs["importance_sampling_ratio"] = trl_correction(case, correction)
    return inputs


def trl_correction(case: Case, correction: Correction) -> torch.Tensor:
    """The weights of TRL's ``_generate_and_score_completions``, its lines on ``vllm_importance_sampling_mode`` run."""
    import inspect
    import math
    import textwrap

    from trl.trainer.grpo_trainer import GRPOTrainer

    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    begin = source.index(
        "mask = completion_mask if tool_mask is None else completion_mask * tool_mask\n                per_token"
    )
    end = source.index("# Compute the per-token log probabilities for the reference model")
    names = {
        "self": SimpleNamespace(
            vllm_importance_sampling_mode=correction.mode,
            vllm_importance_sampling_clip_min=correction.low,
            vllm_importance_sampling_clip_max=correction.high,
        ),
        "torch": torch,
        "math": math,
        "tool_mask": None,
        "completion_mask": case.mask_CT,
        "old_per_token_logps": case.old_CT,
        "sampling_per_token_logps": case.sampled_CT,
    }
    exec(textwrap.dedent(" " * 16 + source[begin:end]), names)
    weights = names["vllm_importance_sampling_ratio"]
    assert isinstance(weights, torch.Tensor)
    return weights


def our_loss(case: Case, objective: Objective, coefficient: float | None = None) -> tuple[torch.Tensor, ...]:
    """Loss and gradients by log-prob and entropy, of ours."""
    logprobs_N = case.flat(case.logprobs_CT).requires_grad_()
    entropy_N = case.flat(case.entropy_CT).requires_grad_()
    sampled_N = case.flat(case.sampled_CT)
    mask_N, num_kept = None, len(entropy_N)
    if objective.top_entropy_quantile < 1:
        # TRL takes the quantile of float32 entropies.
        threshold = entropy_threshold(entropy_N.detach().float(), objective.top_entropy_quantile)
        mask_N = entropy_N.detach() >= threshold
        num_kept = int(mask_N.sum())
    tokens = make_tokens(
        logprob=logprobs_N,
        sampled_logprob=sampled_N,
        old_logprob=case.flat(case.old_CT) if objective.correction.mode != "none" else sampled_N,
        entropy=entropy_N,
        advantage=spread(case.advantages_C, case.lengths_C),
        length=case.lengths_C,
        reference_logprob=case.flat(case.reference_CT) if objective.kl.beta else None,
        mask=mask_N,
    )
    loss = policy_loss(tokens, objective, case.totals(num_kept), entropy_coefficient=coefficient).loss
    loss.backward()
    gradients = (torch.zeros_like(values) if values.grad is None else values.grad for values in (logprobs_N, entropy_N))
    return (loss.detach(), *gradients)


# TRL rounds the temperatures to float32, which these numbers survive; SAPO's own 1.05 would not.
SAPO: dict[str, Any] = {"parameters": {"temperature_positive": 1.5, "temperature_negative": 1.0625}}
CLIP: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.28}
TOKEN_LOSSES: dict[str, dict[str, Any]] = {
    "grpo": CLIP,
    "dr_grpo": CLIP,
    "dapo": CLIP,
    "cispo": {},
    "sapo": SAPO,
    "vespo": {},
}


def of_trl(name: str) -> dict[str, Any]:
    own = {"cispo": {"epsilon_high": 5.0}, "sapo": {"sapo_temperature_pos": 1.5, "sapo_temperature_neg": 1.0625}}
    return {"loss_type": name, **own.get(name, {})}


CASES: dict[str, tuple[Objective, dict[str, Any]]] = {
    name: (Objective(name, **options), of_trl(name)) for name, options in TOKEN_LOSSES.items()
}
SEQUENCE = {"importance_sampling_level": "sequence"}
CASES |= {
    "gspo": (Objective("gspo", **CLIP), {"loss_type": "grpo", **SEQUENCE}),
    "gspo_with_its_own_bounds": (
        Objective("gspo"),
        {"loss_type": "grpo", "epsilon_low": 3e-4, "epsilon_high": 4e-4, **SEQUENCE},
    ),
    "luspo": (Objective("luspo", **CLIP), {"loss_type": "luspo", **SEQUENCE}),
    "sapo_of_sequences": (Objective("sapo", ratio="sequence", **SAPO), {**of_trl("sapo"), **SEQUENCE}),
    "bnpo": (Objective("dapo", **CLIP), {"loss_type": "bnpo"}),  # the step is one micro-batch there
    "dual_clip": (Objective("dapo", delta=1.5, **CLIP), {"loss_type": "dapo", "delta": 1.5}),
    "dual_clip_of_completions": (Objective("grpo", delta=1.5, **CLIP), {"loss_type": "grpo", "delta": 1.5}),
    "off_policy_mask": (Objective(off_policy_threshold=0.02, **CLIP), {"off_policy_mask_threshold": 0.02}),
    "entropy": (Objective(entropy=EntropyBonus(0.03), **CLIP), {"entropy_coef": 0.03}),
    "top_entropy": (Objective(top_entropy_quantile=0.3, **CLIP), {"top_entropy_quantile": 0.3}),
    "top_entropy_with_bonus_and_kl": (
        Objective("grpo", top_entropy_quantile=0.3, entropy=EntropyBonus(0.03), kl=KLTerm(0.1), **CLIP),
        {"loss_type": "grpo", "top_entropy_quantile": 0.3, "entropy_coef": 0.03, "beta": 0.1},
    ),
}
for name, options in TOKEN_LOSSES.items():
    CASES[f"{name}_with_kl"] = (Objective(name, kl=KLTerm(0.1), **options), of_trl(name) | {"beta": 0.1})
    weighted = KLTerm(0.1, importance_weighted=True)
    CASES[f"{name}_with_weighted_kl"] = (
        Objective(name, kl=weighted, **options),
        of_trl(name) | {"beta": 0.1, "use_bias_correction_kl": True},
    )
CASES["gspo_with_weighted_kl"] = (
    Objective("gspo", kl=KLTerm(0.1, importance_weighted=True), **CLIP),
    {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True, **SEQUENCE},
)


def assert_same(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    assert theirs[1].norm() > 1e-3  # there is something to compare
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_an_objective_has_the_loss_and_gradient_of_trl(name: str, seed: int) -> None:
    case = Case(seed)
    objective, settings = CASES[name]
    assert_same(our_loss(case, objective), trl_loss(case, **settings))


def test_an_entropy_bonus_with_a_target_follows_trl_from_step_to_step() -> None:
    plugin, objective = fresh(EntropyTarget(0.7, 0.03, 0.01, max_coefficient=0.045)), Objective(**CLIP)
    theirs: dict[str, Any] = {"entropy_coef": 0.03, "_last_world_entropy": float("inf")}
    applied = []
    for step, scale in enumerate((0.5, 0.5, 0.5, 2.0, 2.0, 0.5, 0.5)):
        case = Case(step)
        case.entropy_CT *= scale
        trainer, expected = trl_step(
            case,
            use_adaptive_entropy=True,
            entropy_target=0.7,
            entropy_coef_delta=0.01,
            entropy_coef_max=0.045,
            **theirs,
        )
        plugin.on_minibatch(taken := make_step(entropy=float(case.flat(case.entropy_CT).mean())))
        applied.append(taken.entropy_coefficient)
        assert_same(our_loss(case, objective, applied[-1]), expected)
        plugin.on_optimizer_step(taken)
        theirs = {name: getattr(trainer, name) for name in theirs}
        assert plugin.state_dict()["coefficient"] == pytest.approx(theirs["entropy_coef"])
        assert plugin.last_entropy == pytest.approx(theirs["_last_world_entropy"])
    assert applied == pytest.approx([0.0, 0.04, 0.045, 0.045, 0.0, 0.0, 0.035])


CORRECTIONS = [
    Correction(mode, low, high)
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    for low, high in ((None, 3.0), (0.9, 1.1), (0.7, None))
]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c.mode}-{c.low}-{c.high}")
def test_correction_weights_are_those_of_trl(correction: Correction) -> None:
    case = Case(5)
    theirs = trl_correction(case, correction).expand_as(case.mask_CT)
    ours = correction_weights(case.flat(case.old_CT), case.flat(case.sampled_CT), case.lengths_C, correction)
    assert ours.std() > 0
    torch.testing.assert_close(ours, case.flat(theirs), rtol=1e-12, atol=0)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c.mode}-{c.low}-{c.high}")
@pytest.mark.parametrize("loss", ["dapo", "gspo", "cispo", "vespo"])
def test_a_corrected_objective_has_the_loss_and_gradient_of_trl(loss: str, correction: Correction) -> None:
    if loss == "vespo" and correction.mode.startswith("sequence"):
        with pytest.raises(ValueError, match="take token_truncate or token_mask"):
            Objective(loss, correction=correction)
        return
    case = Case(5)
    options = CLIP if loss in ("dapo", "gspo") else {}
    objective = Objective(loss, correction=correction, kl=KLTerm(0.1), **options)
    settings = {"loss_type": "grpo", **SEQUENCE} if loss == "gspo" else of_trl(loss)
    assert_same(our_loss(case, objective), trl_loss(case, correction, beta=0.1, **settings))
