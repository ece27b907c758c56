"""The doctor names all mistakes that parsing finds, where the parser ends at the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_grpo.cli.parsing.mistakes import parse_or_exit
from lit_grpo.cli.parsing.write_options import fit_parser

CONFIG = """
model:
  num_generations: many  # and more
  sampling: {max_tokens: 8, temperature: hot}
  generator: {class_path: slots, init_args: {num_slot: 4}}
  optimizer: {class_path: AdamW, init_args: {lr: 1e-6}}
data:
  batch_size: few
"""


def test_all_mistakes_of_a_config_and_of_the_command_line_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser, parsed = fit_parser(), []
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    given = ["--data.eval_batch_size", "x", "--model.pass_at_k=a", "--model.generator=nope", "--seed_everything", "3"]
    with pytest.raises(SystemExit) as ended:
        parse_or_exit(lambda those: parsed.append(parser.parse_args(those)), ["--config", str(path), *given])
    assert ended.value.code == 2 and path.read_text() == CONFIG
    errors = capsys.readouterr().err.splitlines()
    fields = ["model.num_generations", "model.sampling.temperature", "model.generator.num_slot", "data.batch_size"]
    fields += ["data.eval_batch_size", "model.pass_at_k", "model.generator is 'nope'"]
    assert all(any(field in error for error in errors) for field in fields) and len(errors) == len(fields), errors
    (last,) = parsed
    assert (last.seed_everything, last.model.sampling.max_tokens, last.model.optimizer.init_args.lr) == (3, 8, 1e-6)


def test_a_mistake_whose_field_is_not_known_is_told_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_or_exit(fit_parser().parse_args, ["--config", "absent", "--data.batch_size", "x"])
    assert capsys.readouterr().err.startswith("error: There is no config 'absent'")
