"""The doctor names all mistakes that parsing finds, where the parser ends at the first."""

from __future__ import annotations

import pytest

from lit_grpo.cli.parsing.mistakes import parse_or_exit
from lit_grpo.cli.parsing.write_options import fit_parser


def test_a_mistake_whose_field_is_not_known_is_told_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_or_exit(fit_parser().parse_args, ["--config", "absent", "--data.batch_size", "x"])
    assert capsys.readouterr().err.startswith("error: There is no config 'absent'")
