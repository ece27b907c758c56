"""What the command line was given is refused in one sentence, before anything is made or moved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_policy
from hand_made import Batches, Checkpoints, make_module, make_trainer, random_groups
from made_runs import make_checkpoint

from lit_grpo.checkpoints import WholeFileIO
from lit_grpo.cli.parsing.refusals import check_settings, check_values

TRAINER = {
    "strategy": "auto",
    "accelerator": "auto",
    "gradient_clip_val": None,
    "accumulate_grad_batches": 1,
    "val_check_interval": None,
    "check_val_every_n_epoch": None,
}


def settings(ckpt_path: str | None = None, **trainer: Any) -> dict[str, Any]:
    return {"trainer": TRAINER | trainer, "ckpt_path": ckpt_path, "run": {"wandb": "disabled"}}


@pytest.mark.parametrize(
    ("trainer", "sentence"),
    [
        ({"strategy": "fsdp"}, r"trainer\.strategy 'fsdp' is not supported; use auto, or of several .* ddp or fsdp2"),
        ({"accumulate_grad_batches": 2}, r"accumulate_grad_batches is 2, .* model\.max_tokens_per_micro_batch; set"),
        ({"val_check_interval": 0.5}, r"trainer\.val_check_interval is 0\.5, but it counts updates, .* such as 10"),
    ],
)
def test_what_lightning_would_say_of_its_own_fields_is_said_of_ours(trainer: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_settings(settings(**trainer), fits=True)


def test_settings_that_work_are_taken() -> None:
    check_settings(settings(val_check_interval=10, strategy="ddp", accelerator="cpu"), fits=True)
    check_settings(settings(gradient_clip_val=1.0), fits=False)


def test_a_gpu_that_is_not_there_is_missed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"trainer\.accelerator is 'cuda', but torch finds no such device here"):
        check_settings(settings(accelerator="cuda"), fits=True)


@pytest.mark.parametrize(("accelerator", "is_apple"), [("mps", False), ("auto", True), ("gpu", True)])
def test_an_apple_gpu_is_refused(accelerator: str, is_apple: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: is_apple)
    refused = rf"is '{accelerator}', which would train on an Apple GPU \(mps\); .* set trainer\.accelerator to cpu"
    with pytest.raises(ValueError, match=refused):
        check_settings(settings(accelerator=accelerator), fits=True)
    check_settings(settings(accelerator="cpu"), fits=True)


def test_a_logger_that_is_not_installed_is_missed_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"run\.wandb is offline, but wandb is not installed; install lit_grpo\[wandb\]"
    ):
        check_settings(settings() | {"run": {"wandb": "offline"}}, fits=True)


def test_checkpoints_come_from_disk_and_from_runs(tmp_path: Path) -> None:
    (tmp_path / "text.ckpt").write_text("{}")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    torch.save({"policy_version": 1, "state_dict": {}, "hook": Path}, tmp_path / "code.ckpt")
    refused = {
        "http://127.0.0.1:1/last.ckpt": "checkpoints are loaded from disk only",
        "s3://bucket/last.ckpt": "checkpoints are loaded from disk only",
        str(tmp_path / "absent.ckpt"): "There is no checkpoint",
        str(tmp_path): "is a folder of checkpoints; give one of them, such as",
        str(tmp_path / "text.ckpt"): "is no checkpoint, or a damaged one",
        str(tmp_path / "code.ckpt"): "or one that would run code",
        str(
            tmp_path / "foreign.ckpt"
        ): "is not as expected: hyper_parameters: field required, and 1 more field likewise",
    }
    for path, sentence in refused.items():
        with pytest.raises(ValueError, match=sentence):
            check_settings(settings(path), fits=True)
    WholeFileIO().save_checkpoint(make_checkpoint(), tmp_path / "ours.ckpt")
    check_settings(settings(str(tmp_path / "ours.ckpt")), fits=True)


def test_a_checkpoint_of_an_earlier_format_is_refused_where_training_would_go_on_from_it(tmp_path: Path) -> None:
    torch.save({name: part for name, part in make_checkpoint().items() if name != "format"}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"another version of lit_grpo \(format earlier, .* python -m lit_grpo export"):
        check_settings(settings(str(tmp_path / "last.ckpt")), fits=True)
    check_settings(settings(str(tmp_path / "last.ckpt")), fits=False)


def test_a_truncated_checkpoint_names_the_newest_whole_one_beside_it(tmp_path: Path) -> None:
    for name, version in (("best", 4), ("older", 2), ("last", 6)):
        WholeFileIO().save_checkpoint(make_checkpoint(version), tmp_path / f"{name}.ckpt")
    last = tmp_path / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(
        ValueError, match=r"last\.ckpt' is .* damaged .*; give '\S+best\.ckpt', which is undamaged and of update 4"
    ):
        check_settings(settings(str(last)), fits=True)
    for path in (tmp_path / "best.ckpt", tmp_path / "older.ckpt"):
        path.unlink()
    with pytest.raises(ValueError, match="give one that a run has left in its folder"):
        check_settings(settings(str(last)), fits=True)


def test_a_checkpoint_of_another_policy_is_refused(policy_folder: Path, tmp_path: Path) -> None:
    groups = random_groups(random_policy(), [[1.0, 0.0, 0.0, 1.0]])
    make_trainer(Checkpoints(tmp_path)).fit(make_module(policy_folder), Batches([groups]))
    wider = tmp_path / "wider"
    random_policy(hidden_size=64).save_pretrained(wider)
    for path in policy_folder.glob("tokenizer*"):
        (wider / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=r"of another policy: the shape of policy\.model\S+ is \(\d+, 32\) there and"):
        make_trainer().fit(make_module(wider), Batches([groups]), ckpt_path=tmp_path / "1.ckpt")


@dataclass(frozen=True)
class Inner:
    size: int = 1
    name: str | None = None


class Outer:
    def __init__(self, inner: Inner = Inner(), inners: list[Inner] | None = None, source: Any = None) -> None:
        pass


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (None, "outer is null, but it is a group of fields"),
        ({"inner": True}, r"outer\.inner is True, but it is a group of fields"),
        ({"inner": {"size": None}}, r"outer\.inner\.size is null, but needs a value"),
        ({"inners": [{"size": 2}, {"size": None}]}, r"outer\.inners\[1\]\.size is null"),
        (
            {"source": {"class_path": f"{__name__}.Outer", "init_args": {"inner": None}}},
            r"outer\.source\.inner is null",
        ),
    ],
)
def test_a_null_in_a_field_that_needs_a_value_is_refused_by_name(fields: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_values({"outer": fields}, {"outer": Outer})


def test_a_null_where_there_may_be_none_is_taken() -> None:
    check_values({"outer": {"inner": {"name": None}, "inners": None, "source": None}}, {"outer": Outer, "none": Outer})
