"""The doctor names all mistakes that parsing finds, where the parser ends at the first."""

from __future__ import annotations

import pytest
from test_docs import parsers

from lit_grpo.cli.parsing.mistakes import parse_or_exit


def test_a_mistake_whose_field_is_not_known_is_told_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_or_exit(parsers()["fit"].parse_args, ["--config", "absent", "--data.batch_size", "x"])
    assert capsys.readouterr().err.startswith("error: There is no config 'absent'")
