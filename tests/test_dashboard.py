"""The specification of boards, and the command that makes a view of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_grpo.cli.parsing.refusals import check_settings
from lit_grpo.tools.commands import dashboard
from lit_grpo.tools.dashboard import sections
from lit_grpo.training.loggers import WandB


def test_panels_show_metrics_of_their_section_and_no_name_is_explained_twice() -> None:
    names = [metric.name for section in sections() for metric in section.metrics]
    assert len(names) == len(set(names))
    for section in sections():
        shown = [name for panel in section.panels for name in panel.metrics]
        assert set(shown) <= {metric.name for metric in section.metrics} and len(shown) == len(set(shown))


def test_a_view_needs_a_project_a_key_and_a_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(error: Exception) -> Any:
        def save(*_: str) -> str:
            raise error

        return save

    for project, save, said in (
        ("mine", None, "--wandb is 'mine'; give an entity and a project"),
        ("me/mine", failing(ModuleNotFoundError(name="wandb_workspaces")), "install lit_grpo[wandb]"),
        ("me/mine", failing(RuntimeError("no key\nat all")), "W&B did not take the view (no key); check wandb login"),
    ):
        monkeypatch.setattr(dashboard, "save", save)
        with pytest.raises(SystemExit, match="2"):
            dashboard.main(["--wandb", project])
        assert said in capsys.readouterr().err
    monkeypatch.setattr(dashboard, "save", lambda *names: "/".join(names))
    dashboard.main(["--wandb", "me/mine"])
    assert capsys.readouterr().out == "The view is at me/mine/lit_grpo\n"


def test_an_online_run_without_a_key_is_refused_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "login", lambda prompt: False)
    trainer = {"strategy": "auto", "accelerator": "cpu", "gradient_clip_val": None, "accumulate_grad_batches": 1}
    trainer |= {"val_check_interval": 1, "check_val_every_n_epoch": None}
    with pytest.raises(ValueError, match=r"W&B knows no API key of yours; run wandb login, or set WANDB_API_KEY"):
        check_settings({"trainer": trainer, "run": {"wandb": "online"}}, fits=True)


def test_a_server_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")

    def init(**_: object) -> None:
        raise wandb.errors.CommError("Timed out.\nConsider more.")

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "run", None)
    logger = WandB(tmp_path / "wandb-id", resumes=False, name="one", save_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"W&B does not take the run \(Timed out\); set run.wandb to offline"):
        _ = logger.experiment
    assert not (tmp_path / "wandb-id").exists()
