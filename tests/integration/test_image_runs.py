"""A run with images as its user goes around it: adapters, a resume with another setting, and what is finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_grpo.__main__ import start

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
