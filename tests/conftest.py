"""Fixtures: a random policy of each kind that tests need, made on the spot."""

from __future__ import annotations

import atexit
import csv
import functools
import gc
import subprocess
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # what only deals out the files need not import it
    import torch
    from transformers import PreTrainedModel

WITH_VLLM = (
    *("test_server_faults", "test_generators", "test_overlapping_modes", "test_weight_proof", "test_vllm_engine"),
    *("test_vllm_setup", "test_vllm_gpu_paths"),
)
"""Files whose quick tests import vLLM, which takes twice as long as torch: one worker runs them."""
SLOWEST = (
    *(*WITH_VLLM, "test_benchmarks", "test_real_model", "test_triton_code", "test_kill_and_resume", "test_ray"),
    *("test_command_line", "test_two_ranks", "test_serve", "test_fsdp2", "test_doctor"),
    *("test_wheel", "test_notebooks", "test_stops", "test_full_disk", "test_resume", "test_shards_on_disk"),
    *("test_terminal", "test_training_modes", "test_lost_ranks", "test_run_folders", "test_adapters_alone"),
    *("test_budgets", "test_commands", "test_boards", "test_examples", "test_missing_packages", "test_fuzz"),
    *("test_simulation", "test_shared_prefix", "test_reward_runner", "test_metrics", "test_sources", "test_tiny"),
)
"""Files that take longest begin first, so that no worker is left alone with one at the end."""
ALPHABET = "0123456789+-*=# abcdefghijklmnop?"


def table_rows(table: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Rows for ``pytest.mark.parametrize``: ``make test`` runs those in ``quick``, ``make nightly`` the others.

    Args:
        table: The rows, or their names; a tuple is a row of several arguments.
        quick: One row of each kind, which together prove the mechanism.
    """
    table = list(table)
    assert all(row in table for row in quick), f"{quick} names rows that are not there"
    values = [row if isinstance(row, tuple) else (row,) for row in table]
    marks = [() if row in quick else pytest.mark.nightly for row in table]
    return [pytest.param(*of_row, marks=mark) for of_row, mark in zip(values, marks, strict=True)]


def read_metrics(table: Path) -> list[dict[str, str]]:
    """Return the rows of a run's ``metrics.csv``."""
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


gc.disable()  # imports and collection leave no garbage, and looking for it takes a sixth of their time


def pytest_collection_finish() -> None:
    gc.freeze()  # nor is anything to be found among what is there by now
    atexit.register(gc.unfreeze)  # or triton's bindings tell of every object that is left at the end
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # xdist deals files in the order of the collection


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    from forks import Worker

    measures_coverage = getattr(config.option, "cov_source", None)  # of imports as well, which a fork does not make
    if sys.platform == "linux" and not measures_coverage:
        subprocess.Popen = Worker  # in the process that deals out the files, which starts nothing else


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByImports(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "vllm" if Path(file).stem in WITH_VLLM else file

    is_quick = config.option.markexpr == "not nightly"  # of the others, one worker would have too many
    return ByImports(config, log) if is_quick and config.option.dist == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _one_parser() -> Iterator[None]:
    """Runs of this process share their parsers, which those of a fork have been given."""
    from forks import share_parsers

    with pytest.MonkeyPatch.context() as monkeypatch:
        share_parsers(monkeypatch.setattr)
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window, that asks nobody for anything."""
    from chromium import launch

    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        opened = launch(started)
        if opened is None:
            pytest.skip("no Chromium is installed (apt-get install chromium, or python tests/chromium.py)")
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def forked_servers() -> Iterator[None]:
    """vLLM servers of this process are forks of one that has imported vLLM."""
    from forks import VLLM, Forked

    forking = vars(subprocess) | {"Popen": functools.partial(Forked, imports=VLLM)}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("lit_grpo.rollout.vllm.process.subprocess", types.SimpleNamespace(**forking))
        yield


@pytest.fixture(scope="module")
def forked_inspections() -> Iterator[None]:
    """So is the process in which an engine of this process looks at a class of models, the first time on a machine."""
    from forks import VLLM, Forked

    from lit_grpo.rollout.vllm.arguments import import_vllm

    def run(command: list[str], input: bytes, capture_output: bool) -> subprocess.CompletedProcess[bytes]:
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with Forked(command, imports=VLLM, **streams) as process:
            said = process.communicate(input)
        return subprocess.CompletedProcess(command, process.returncode, *said)

    import_vllm()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("vllm.model_executor.models.registry.subprocess", types.SimpleNamespace(run=run))
        yield


@pytest.fixture
def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in the place of the Python that servers are started with."""

    def replace(script: str) -> None:
        fake = tmp_path / "python"
        fake.write_text(f"#!/bin/sh\n{script}\n")
        fake.chmod(0o755)
        monkeypatch.setattr("sys.executable", str(fake))

    return replace


def save_tokenizer(folder: Path, **changes: str) -> str:
    """Save a character tokenizer with <pad> = 0 and <eos> = 1, and return the folder.

    Args:
        folder: The folder to save it into.
        changes: What it has besides, such as ``chat_template``.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate(["<pad>", "<eos>", *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>"} | changes
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return str(folder)


def save_policy(folder: Path, template: str | None = None, **changes: Any) -> Path:
    """Save a :func:`random_policy` with its tokenizer, which may have a chat template; return the folder."""
    random_policy(**changes).save_pretrained(folder)
    save_tokenizer(folder, **{"chat_template": template} if template else {})
    return folder


def random_policy(seed: int = 0, hybrid: bool = False, **changes: object) -> PreTrainedModel:
    """Return a Qwen3 of 30 thousand random parameters, in evaluation mode.

    A ``hybrid`` is a Qwen3.5: two gated DeltaNets, which have recurrent states, then attention.
    """
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

    if hybrid:
        changes = HYBRID | changes
    kinds: tuple[Any, Any] = (Qwen3_5TextConfig, Qwen3_5ForCausalLM) if hybrid else (Qwen3Config, Qwen3ForCausalLM)
    sizes: dict[str, Any] = {
        "vocab_size": len(ALPHABET) + 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "initializer_range": 0.3,  # a distribution with something to sample from
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config, model = kinds
        return model(config(**(sizes | changes))).eval()


HYBRID: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    **{f"linear_num_{kind}_heads": 4 for kind in ("key", "value")},
    **{f"linear_{kind}_head_dim": 8 for kind in ("key", "value")},
    "initializer_range": 0.1,  # more, and gradients are so steep that rounding grows by updates
}


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3's norms compute in float32, whatever the dtype of the weights; here they compute in it."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    def forward(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
        return norm.weight * hidden * (hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()

    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)


@pytest.fixture(scope="module")
def policy() -> Any:
    """What is in ``policy_folder``."""
    return random_policy()


@pytest.fixture(scope="module")
def tokenizer(policy_folder: Path) -> Any:
    from lit_grpo.policy.loading import load_tokenizer

    return load_tokenizer(str(policy_folder))


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved random policy with its tokenizer."""
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def hybrid_folder(policy_folder: Path) -> Path:
    """A saved random hybrid with layers that draft, in a folder ``hybrid`` of the random policy's."""
    from tests.doubles.draft_layers import add_heads

    folder = policy_folder / "hybrid"
    save_policy(folder, hybrid=True)
    add_heads(folder, "qwen3_5_text")
    return folder
