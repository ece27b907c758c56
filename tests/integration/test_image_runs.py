"""A run with images as its user goes around it: adapters, a resume with another setting, and what is finished."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from seeing import end_turns_soon, load, make_policy, png
from transformers import AutoModelForImageTextToText, AutoProcessor

from lit_grpo.__main__ import start
from lit_grpo.policy.named import TINY_SHAPES, resolve_policy
from lit_grpo.tasks import ShapesRows

pytestmark = pytest.mark.nightly
SHORT = "--trainer.val_check_interval 2 --data.batch_size 4 --data.train.init_args.num_rows 16"
SHORT += " --data.validation.init_args.num_rows 8 --trainer.enable_progress_bar false"


def said(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Return the exit code of a command line, and what it says."""
    code: object = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["lit_grpo", *command.split()])
        try:
            start()
        except SystemExit as end:
            code = end.code or 0
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.mark.parametrize("vision", ["trained", "frozen"])
def test_adapters_are_resumed_bit_for_bit_and_merged(
    vision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the tower too where it is trained; what is finished computes what base and adapter compute."""
    monkeypatch.chdir(tmp_path)
    run = f"fit --config shapes {SHORT} --model.vision {vision} --model.lora.r 4 --model.optimizer.lr 0.01"
    assert said(f"{run} --run.name whole --trainer.max_steps 4", capsys)[0] == 0
    assert said(f"{run} --run.name part --trainer.max_steps 2", capsys)[0] == 0
    last = "--ckpt_path runs/part/checkpoints/last.ckpt"
    code, told = said(f"fit --config runs/part/config.yaml {last} --trainer.max_steps 4", capsys)
    assert code == 0, told
    whole, part = (load_file(f"runs/{name}/policy/adapter/adapter_model.safetensors") for name in ("whole", "part"))
    assert whole.keys() == part.keys() and all(torch.equal(whole[name], part[name]) for name in whole)
    assert any("vision_model" in name and whole[name].any() for name in whole if "lora_B" in name) == (
        vision == "trained"
    )
    code, told = said("finish runs/whole --gguf none", capsys)
    assert code == 0, told
    finished = "runs/whole/finished"
    base = AutoModelForImageTextToText.from_pretrained(resolve_policy(TINY_SHAPES))
    base.load_adapter("runs/whole/policy/adapter")
    row = next(iter(ShapesRows(1, split="validation").rows()))
    inputs = AutoProcessor.from_pretrained(finished)(text="<image>How many circles?:", images=[row["image"]],
                                                     return_tensors="pt")  # fmt: skip
    merged, untrained = (
        AutoModelForImageTextToText.from_pretrained(place)(**inputs).logits
        for place in (finished, resolve_policy(TINY_SHAPES))
    )
    assert torch.allclose(merged, base(**inputs).logits, atol=1e-4)
    assert not torch.allclose(merged, untrained, atol=1e-2)


@pytest.mark.parametrize("settings", ["--model.vision frozen --model.lora.r 4", "--model.vision trained"])
def test_a_run_is_resumed_and_finished_with_its_tower(
    settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = f"fit --config shapes {SHORT} {settings} --rollout.plugins april"
    assert said(f"{run} --trainer.max_steps 2", capsys)[0] == 0
    last = "--ckpt_path runs/shapes/checkpoints/last.ckpt"
    code, told = said(f"fit --config runs/shapes/config.yaml {last} --trainer.max_steps 4", capsys)
    assert code == 0, told
    code, told = said("finish runs/shapes", capsys)
    assert code == 2 and "family idefics3, which is not written as GGUF" in told and "--gguf none" in told
    code, told = said("finish runs/shapes --gguf none", capsys)
    assert code == 0, told
    finished = tmp_path / "runs/shapes/finished"
    assert "AutoModelForImageTextToText.from_pretrained" in (finished / "README.md").read_text()
    assert (finished / "preprocessor_config.json").exists()
    (tmp_path / "runs/shapes/checkpoints/last.ckpt").rename(tmp_path / "gone.ckpt")
    code, told = said("finish runs/shapes --gguf none --output again", capsys)  # from the exported folder
    assert code == 0, told


CAMERA = """
from PIL import Image


class Camera:
    def reset(self, number: int):
        self.number, self.num = number, 0
        first = Image.new("RGB", (32, 32), (number, 0, 0))
        return [{"type": "text", "text": "Look: "}, {"type": "image", "image": first}]

    def respond(self, text: str):
        self.num += 1
        shown = Image.new("RGB", (48, 32), (0, self.num, self.number))
        return None if self.num > 2 else [{"type": "image", "image": shown}, {"type": "text", "text": "and now?"}]

    def get_reward(self):
        return float(self.num)

    def state(self):
        return [self.number, self.num]

    def restore(self, state):
        self.number, self.num = state
"""


@pytest.mark.parametrize("rows", ["with images", "of texts"])
def test_an_environment_that_shows_images_is_trained_on_carried_and_resumed(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = make_policy("qwen3_vl", tmp_path / "policy")
    model, _, _ = load(policy)
    end_turns_soon(model)
    model.save_pretrained(policy)
    (tmp_path / "camera.py").write_text(CAMERA)
    (tmp_path / "one.png").write_bytes(png(32, 32, 0))
    image, column = (', "image": "one.png"', " --data.image_column image") if rows == "with images" else ("", "")
    lines = [f'{{"prompt": "What is it?", "number": {number}{image}}}' for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    run = f"fit --model.policy {policy} --model.vision trained --data.train rows.jsonl --data.batch_size 2{column}"
    run += " --rollout.plugins environments:factory=camera.py:Camera --rollout.plugins+ april --run.name shown"
    run += " --model.sampling.max_tokens 60 --model.sampling.max_observed 200 --model.num_generations 4"
    run += " --model.eval_sampling.max_observed 200 --trainer.accelerator cpu --trainer.enable_progress_bar false"
    code, told = said(f"{run} --trainer.max_steps 2", capsys)
    assert code == 0, told
    last = "--ckpt_path runs/shown/checkpoints/last.ckpt"
    code, told = said(f"fit --config runs/shown/config.yaml {last} --trainer.max_steps 4", capsys)
    assert code == 0, told
    frame = (tmp_path / "runs/shown/metrics.csv").read_text()
    assert "environments/" in frame


def test_people_see_the_pictures_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the terminal, in W&B offline, in the report, by doctor, and what the tower takes by fit-check."""
    import wandb

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    run = f"--config shapes {SHORT} --run.wandb offline --trainer.max_steps 1 --trainer.val_check_interval 1"
    code, told = said(f"fit {run}", capsys)
    wandb.finish()
    assert code == 0 and "[image 48x48] How many" in told and "pad_token_id" not in told, told
    (log,) = tmp_path.glob("runs/shapes/wandb/offline-run-*/*.wandb")
    assert len({*re.findall(rb"media/images/\w+\.png", log.read_bytes())}) > 8  # of the artifacts that tables are
    row = json.loads((tmp_path / "runs/shapes/val_samples.jsonl").read_text().splitlines()[0])
    assert said("report runs/shapes", capsys)[0] == 0
    assert row["prompt_images"] in (tmp_path / "runs/shapes/report.html").read_text()
    code, told = said(f"doctor {run}", capsys)
    assert code == 0 and "12 to 12 tokens an image" in told, told
    page = (tmp_path / "runs/doctor-prompts.html").read_text()
    assert page.count("<img src=") == 3 and "48 x 48 pixels, 12 tokens" in page and "[9 x &lt;image&gt;]" in page
    code, told = said(f"fit-check --config shapes {SHORT} --memory 8GiB", capsys)
    assert code == 0 and told.count("images") == 2 and "346,976 parameters" in told, told
