"""Configs of TRL's, converted, run a few steps with another policy and other data."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import read_metrics, table_rows

import lit_grpo
from lit_grpo.cli.command_line import run
from lit_grpo.tools.commands.from_trl import main as from_trl
from lit_grpo.tools.commands.from_trl import train_arguments

PLAIN: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2-0.5B-Instruct",
    "dataset_name": "prompts.jsonl",
    "reward_funcs": ["rewards.score"],
    "output_dir": "runs/trl",
    "learning_rate": 1e-5,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 12,
    "bf16": False,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"beta": 0.04, "loss_type": "grpo", "warmup_steps": 2, "seed": 7},
    "dapo": {
        "loss_type": "dapo",
        "epsilon_high": 0.28,
        "mask_truncated_completions": True,
        "steps_per_generation": 4,
        "lr_scheduler_type": "constant",
        "reward_funcs": ["rewards.score", "get_soft_overlong_punishment"],
        "reward_weights": [1.0, 0.5],
    },
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "num_iterations": 2,
        "scale_rewards": "batch",
        "lr_scheduler_type": "cosine",
    },
    "lora": {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "optim": "adamw_torch", "seed": 3},
    "vllm colocate": {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_importance_sampling_mode": "token_truncate",
        "top_entropy_quantile": 0.5,
    },
}
REWARD = "def score(completions, answer, **kwargs):\n    return [float(len(text) % 3) for text in completions]\n"


@pytest.mark.parametrize("name", table_rows(CONFIGS, ["gspo"]))
def test_a_config_of_trl_is_converted_and_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_folder: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"prompt": f"{n}+{n + 1}=", "answer": str(2 * n + 1)} for n in range(6)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewards.py").write_text(REWARD)
    Path("trl.yaml").write_text(yaml.safe_dump(PLAIN | CONFIGS[name]))
    from_trl(["trl.yaml", "--rows", "6", "--output", "ours.yaml"])
    assert Path("ours.yaml").read_text().startswith("# From trl.yaml of TRL 1.16.")
    others = ["--model.policy", str(policy_folder), "--trainer.enable_progress_bar", "false"]
    if name.startswith("vllm"):  # its own tests start it
        others += ["--model.generator", "slots"]
    run(["fit", "--config", "ours.yaml", *others])
    steps = [row for row in read_metrics(Path("runs/trl/metrics.csv")) if row["loss"]]
    asked = yaml.safe_load(Path("ours.yaml").read_text())
    assert int(steps[-1]["step"]) == asked["trainer"]["max_steps"] >= 2
    assert any(float(row["grad_norm"]) > 0 for row in steps)


def test_a_config_that_cannot_be_had_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "trl.yaml"
    config.write_text(yaml.safe_dump(PLAIN | {"top_k": 50, "max_steps": 3}))
    with pytest.raises(SystemExit, match="2"):
        from_trl([str(config)])
    said = capsys.readouterr().err
    assert said.startswith(f"error: {config}: top_k is 50, which cannot be had:") and said.count("\n") == 1


SCRIPT = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

def score(completions, answer, **kwargs):
    return [float(len(text) % 3) for text in completions]

def main():
    dataset = load_dataset("json", data_files="prompts.jsonl", split="train")
    args = GRPOConfig(
        "runs/trl", learning_rate=1e-3, max_steps=3, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=12, beta=0.04, bf16=False, use_cpu=True, reward_weights=[1.0, 0.5], seed=7,
    )
    trainer = GRPOTrainer(
        "tiny", [score, get_soft_overlong_punishment(max_completion_len=12, soft_punish_cache=4)], args, dataset
    )
    trainer.train()

if __name__ == "__main__":
    main()
"""


@pytest.mark.nightly  # TRL's trainer imports vLLM
def test_a_script_of_trl_is_converted_and_runs_and_so_does_its_config_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_folder: Path
) -> None:
    """The script's config for ``fit``, and its GRPOConfig for ``lit_grpo.train``, are the same run."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n}+{n + 1}=", "answer": str(2 * n + 1)} for n in range(6)]
    Path("train_dataset.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("script.py").write_text(SCRIPT)
    from_trl(["script.py", "--output", "ours.yaml"])
    assert 'dataset.to_json("train_dataset.jsonl")' in Path("ours.yaml").read_text().replace("\n#  ", "")
    run(["fit", "--config", "ours.yaml", "--model.policy", str(policy_folder)])
    trl = pytest.importorskip("trl")
    config = trl.GRPOConfig(
        "runs/python", learning_rate=1e-3, max_steps=3, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=12, beta=0.04, bf16=False, use_cpu=True, seed=7,
    )  # fmt: skip
    score = runpy.run_path("script.py")["score"]
    overlong = {"function": "soft_overlong_penalty", "weight": 0.5, "args": {"max_tokens": 12, "buffer": 4}}
    lit_grpo.train(str(policy_folder), rows, [score, overlong], **train_arguments(config))
    ours, python = (
        [row for row in read_metrics(Path("runs") / name / "metrics.csv") if row["loss"]] for name in ("trl", "python")
    )
    assert [row["step"] for row in ours] == [row["step"] for row in python] == ["1", "2", "3"]
    for name in ("reward", "loss", "grad_norm", "kl", "lr", "num_tokens", "completions/mean_length"):
        assert [row[name] for row in ours] == [row[name] for row in python], name
