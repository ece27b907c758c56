"""A learning rate of all weights with adapters, or of adapters with all weights, is told."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from conftest import random_policy
from hand_made import Batches, Checkpoints, make_module, make_trainer, random_groups, sgd
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LinearLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)
from transformers import AutoModelForCausalLM, Qwen3Config, get_cosine_schedule_with_warmup

from lit_grpo.callbacks import RunSummary
from lit_grpo.optim.course import Course
from lit_grpo.optim.rates import highest_rate, judge, unusual_rate
from lit_grpo.optim.schedule import WarmupDecayLR
from lit_grpo.policy.adapters import LoraSettings, add_adapters
from lit_grpo.policy.loading import load_tokenizer

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
TRAINED = {
    "tiny": 600_000,
    "tiny_calculator": 200_000,
    "tiny_catch": 100_000,
    "tiny_shapes": 350_000,
    "tiny_knights": 600_000,
    "smollm2": 135_000_000,
    "Qwen/Qwen3.5-0.8B": 800_000_000,
    "Qwen/Qwen3-1.7B": 1_700_000_000,
}
LOW = ("is low for LoRA adapters", "set model.optimizer.lr to about ten times the rate")
HIGH = ("is high for training all weights", "set model.optimizer.lr to about a tenth of the rate")


@pytest.mark.parametrize(
    "rate, trained, alpha, expected",
    [
        (1e-6, 3_000_000, 32.0, LOW),  # the default of model.optimizer
        (5e-7, 3_000_000, 16.0, LOW),  # TRL's issue 2872
        (5e-6, 3_000_000, 32.0, None),  # Unsloth's guide
        (1e-5, 3_000_000, 32.0, None),  # TRL's page
        (2e-4, 3_000_000, 32.0, None),
        (1e-6, 3_000_000, 320.0, None),  # as far as 1e-5 with the usual alpha
        (1e-6, 8_000_000_000, None, None),
        (1e-4, 135_000_000, None, None),
        (2e-4, 135_000_000, None, HIGH),
        (1e-3, 600_000, None, None),  # the demo
    ],
)
def test_rates_are_judged_by_what_is_trained(
    rate: float, trained: int, alpha: float | None, expected: tuple[str, str] | None
) -> None:
    said = judge(rate, trained, alpha)
    if said is None or expected is None:
        assert said is expected
    else:
        assert said.figure.startswith(f"{rate:.3g} {expected[0]}") and said.remedy.startswith(expected[1])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_config_of_the_package_has_an_unusual_rate(path: Path) -> None:
    model = yaml.safe_load(path.read_text())["model"]
    alpha = model["lora"]["alpha"] if "lora" in model else None
    assert judge(model["optimizer"]["init_args"]["lr"], TRAINED[model["policy"]], alpha) is None


@pytest.mark.parametrize(
    "optimizer, low",
    [
        (lambda weights: torch.optim.AdamW(weights, lr=1e-6), True),
        (lambda weights: torch.optim.NAdam(weights, lr=1e-6), True),
        (lambda weights: torch.optim.AdamW(weights, lr=1e-4), False),
        (lambda weights: torch.optim.SGD(weights, lr=1e-6), False),
        (lambda weights: torch.optim.Adafactor(weights, lr=1e-6), False),
    ],
)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"], ["embed_tokens"]])
def test_adapters_at_the_default_rate_are_told_for_optimizers_like_adam(
    optimizer: Any, low: bool, targets: list[str] | str
) -> None:
    policy: Any = random_policy()
    assert unusual_rate(policy, optimizer(policy.parameters())) is None
    add_adapters(policy, LoraSettings(r=2, target_modules=targets))
    said = unusual_rate(policy, optimizer([weight for weight in policy.parameters() if weight.requires_grad]))
    assert (said is not None) == low


def test_the_scale_of_adapters_counts_whatever_the_rank() -> None:
    for settings, low in (
        (LoraSettings(r=64, alpha=32), True),
        (LoraSettings(r=64, alpha=32, rslora=True), False),  # alpha / sqrt(r) is that of an alpha of 256
        (LoraSettings(r=1, alpha=256), False),
    ):
        policy: Any = random_policy()
        add_adapters(policy, settings)
        trained = [weight for weight in policy.parameters() if weight.requires_grad]
        assert (unusual_rate(policy, torch.optim.AdamW(trained, lr=2e-6)) is not None) == low


def test_all_weights_of_a_pretrained_size_at_the_rate_of_adapters_are_told() -> None:
    with torch.device("meta"):
        policy: Any = AutoModelForCausalLM.from_config(
            Qwen3Config(num_hidden_layers=2, hidden_size=512, intermediate_size=1024)
        )
    assert policy.num_parameters() > 50_000_000
    said = unusual_rate(policy, torch.optim.AdamW(policy.parameters(), lr=2e-4))
    assert said is not None and said.figure.startswith("0.0002 is high for training all weights")
    policy.model.embed_tokens.requires_grad_(False)
    policy.lm_head.requires_grad_(False)
    assert unusual_rate(policy, torch.optim.AdamW(policy.model.layers.parameters(), lr=2e-4)) is None  # few are trained


@pytest.mark.parametrize("policy", ["bare", "an adapter"])
def test_the_card_of_a_run_tells_of_the_rate(
    policy: str, policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups, folder, settings = random_groups(random_policy(), [[1.0, 0.0, 0.0, 1.0]]), policy_folder, LoraSettings(r=2)
    if policy == "an adapter":
        bare: Any = AutoModelForCausalLM.from_pretrained(policy_folder)
        folder, settings = tmp_path / "adapter", None
        peft.get_peft_model(bare, peft.LoraConfig(r=2, target_modules="all-linear")).save_pretrained(str(folder))
        load_tokenizer(str(policy_folder)).save_pretrained(folder)

    def card(rate: float, **resume: Any) -> str:
        module = make_module(folder, lora=settings, optimizer=partial(torch.optim.AdamW, lr=rate))
        trainer = make_trainer(RunSummary(), max_steps=2 if resume else 1)
        trainer.fit(module, train_dataloaders=Batches([groups, groups]), **resume)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return " ".join(capsys.readouterr().out.split())

    assert (
        "learning rate 1e-06 is low for LoRA adapters; set model.optimizer.lr to about ten times the rate that suits "
        "all weights (1e-5 to 1e-4 for large models) run"
    ) in card(1e-6)
    assert "learning rate" not in card(1e-5, ckpt_path=tmp_path / "last.ckpt", weights_only=True)  # it was raised


def test_the_rate_that_a_schedule_reaches_is_the_one_that_counts() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight], lr=3e-5)
    WarmupDecayLR(optimizer, total_steps=10, warmup_steps=5)
    assert optimizer.param_groups[0]["lr"] == 0 and highest_rate(optimizer.param_groups[0]) == 3e-5
    optimizer = torch.optim.AdamW([weight], lr=3e-5)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-5, total_steps=10)
    assert highest_rate(optimizer.param_groups[0]) == 5e-5


COURSES: dict[str, tuple[Any, str | None]] = {
    "cosine": (
        lambda of: CosineAnnealingLR(of, 4),
        "CosineAnnealingLR falls to 0 at update 5 and rises again",
    ),
    "cosine above 0": (lambda of: CosineAnnealingLR(of, 4, eta_min=0.1), "falls to 0.1 at update 5 and rises again"),
    "cosine of the run": (lambda of: CosineAnnealingLR(of, 8), None),
    "cosine of transformers": (lambda of: get_cosine_schedule_with_warmup(of, 1, 4), "LambdaLR falls to 0 at update 5"),
    "chained": (
        lambda of: ChainedScheduler([CosineAnnealingLR(of, 4), ExponentialLR(of, 0.99)]),
        "ChainedScheduler falls to 0 at update 5 and rises again",
    ),
    "sequence": (
        lambda of: SequentialLR(of, [LinearLR(of, 0.1, 1.0, 2), CosineAnnealingLR(of, 3)], [2]),
        "SequentialLR falls to 0 at update 6 and rises again",
    ),
    "ours": (
        lambda of: WarmupDecayLR(of, 4, 1),
        "WarmupDecayLR is 0 from update 5 on, so that these updates",
    ),
    "ours of the run": (lambda of: WarmupDecayLR(of, 8, 2, decay_steps=2), None),
    "polynomial": (lambda of: PolynomialLR(of, 4), "PolynomialLR is 0 from update 5 on"),
    "linear": (lambda of: LinearLR(of, 1.0, 0.1, 4), None),
    "steps": (lambda of: StepLR(of, 2), None),
    "restarts": (lambda of: CosineAnnealingWarmRestarts(of, 3), None),
    "cyclic": (lambda of: CyclicLR(of, 0.1, 1.0, 2, cycle_momentum=False), None),
    "warm-up": (lambda of: LinearLR(of, 0.1, 1.0, 4), None),
}


@pytest.mark.parametrize("name", COURSES)
def test_a_schedule_that_ends_before_the_run_is_told_of_and_stays_as_it_is(name: str) -> None:
    make, said = COURSES[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    scheduler = make(optimizer)
    before = optimizer.param_groups[0]["lr"]
    course = Course(scheduler)
    course.check(8)
    fresh, resumed = course.finding(8, resumed=False), course.finding(8, resumed=True)
    assert optimizer.param_groups[0]["lr"] == before
    if said is None:
        assert fresh is None and resumed is None
    else:
        assert fresh is not None and said in fresh and "give the schedule 8 steps, or set trainer.max_steps to" in fresh
        assert resumed is not None and said in resumed and "or begin a new run on the policy that" in resumed
    rates = course.rates(8)
    for rate in rates:  # the rates that the run itself will have
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_a_resumed_cosine_that_rises_again_is_told_of_in_the_run(policy_folder: Path, tmp_path: Path) -> None:
    def fit(max_steps: int, ckpt_path: Path | None = None) -> None:
        schedule = partial(CosineAnnealingLR, T_max=2)
        module = make_module(policy_folder, optimizer=sgd(1e-3), lr_scheduler=schedule)
        groups = random_groups(random_policy(), [[1.0, 0.0, 0.0, 1.0]])
        trainer = make_trainer(Checkpoints(tmp_path), max_steps=max_steps)
        trainer.fit(module, Batches([groups] * max_steps), ckpt_path=ckpt_path)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*learning rate of model.lr_scheduler.*")
        fit(2)
    with pytest.warns(UserWarning, match="falls to 0 at update 3 and rises again .* a resumed run keeps its schedule"):
        fit(4, tmp_path / "1.ckpt")
