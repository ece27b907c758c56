"""What ends a run from outside is one sentence that says what to do: no memory, no more files."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lit_grpo.cli import command_line
from lit_grpo.update.micro_batch_size import MicroBatchSize


def too_large() -> Any:
    """Ask torch for more than any machine has."""
    return torch.empty(2**55, dtype=torch.float32)


def too_many_files() -> Any:
    raise OSError(errno.EMFILE, "Too many open files", "policy/config.json")


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (too_large, r"^error: The host's memory ran out \(.*allocate.*\): lower model\.max_tokens_per_micro_batch"),
        (lambda: MicroBatchSize(8).halve(8), r"^error: .*8.*set gradient_checkpointing"),
        (too_many_files, r"^error: The process may not open another file \(policy/config\.json\): .* ulimit -n 4096"),
    ],
)
def test_what_ends_a_run_from_outside_is_one_sentence(
    fail: Callable[[], Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failing: Any = lambda *_, **__: fail()  # noqa: E731
    with pytest.raises(SystemExit):
        command_line.run([], failing)
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(message, said) and "Traceback" not in said, said
