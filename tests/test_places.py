"""A sentence about a field of a config names its file and line."""

from pathlib import Path

import pytest
from test_docs import parsers

from lit_grpo.cli.parsing.places import with_place

CONFIG = """\
model:
  num_generations: 4
  optimizer:
    class_path: AdamW
    init_args:
      lr: 1
data: {batch_size: 2}
"""


@pytest.mark.parametrize(
    ("sentence", "line"),
    [
        ("model.num_generations must be at least 2.", 2),
        ("data.batch_size is 1, and model.num_generations 2.", 7),
        ('Parser key "model.optimizer.lr": Expected a number', 6),
        ("model.optimizer.momentum is unknown", None),
        ("trainer.max_steps is 0", None),
        ("rewards fail.", None),
    ],
)
def test_the_field_is_found_in_the_config(sentence: str, line: int | None, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG)
    place = "" if line is None else f" ({config}, line {line})"
    assert with_place(sentence, ["fit", "--config", str(config)]) == sentence + place
    assert with_place(sentence, ["fit"]) == sentence


def test_a_field_of_the_command_line_is_not_looked_for(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG)
    arguments = ["fit", "--config", str(config), "--data.batch_size", "1", "--model.optimizer.init_args.lr=2"]
    for sentence in ("data.batch_size is 1", "model.optimizer.lr is 2"):
        assert with_place(sentence, arguments) == sentence


def test_the_parser_names_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("data:\n  batch_size: many\n")
    with pytest.raises(SystemExit):
        parsers()["fit"].parse_args(["--config", str(config)])
    assert f"({config}, line 2)" in capsys.readouterr().err
