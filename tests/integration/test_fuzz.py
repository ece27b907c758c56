"""Whatever a config or the data hold: the set-up goes through, or ends in one sentence."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import save_policy
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lit_grpo.cli.command_line import GRPOCLI, run
from lit_grpo.cli.parsing.errors import one_sentence
from lit_grpo.data.module import PromptDataModule
from lit_grpo.policy.loading import load_policy, load_tokenizer
from lit_grpo.training.run_folder import RunConfig

pytestmark = pytest.mark.fuzz

NUM_EXAMPLES = int(os.environ.get("LIT_GRPO_FUZZ", "15"))
SETTINGS = settings(
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate,),  # a failure is shown as it is found: making it smaller takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([10**6, 2**31, 2**63, 10**30, -(2**63)]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=12),
    st.sampled_from(
        ["", " ", "auto", "none", "null", "../..", "a.b.c", "-1", "1e400", "{x}", "\x1b[2J", "\ud7ff", "é" * 300]
    ),
)
VALUES = st.one_of(
    ODD,
    st.lists(ODD, max_size=3),
    st.dictionaries(st.text(max_size=8), ODD, max_size=2),
    st.dictionaries(
        st.sampled_from(["class_path", "init_args", "function", "no_such_field"]), ODD, min_size=1, max_size=2
    ),
)
LIGHTNINGS = ("config", "print_config", "help", "weights_only")
"""Not settings of a run."""
FILES = [
    "none.ckpt",
    "empty.ckpt",
    "junk.ckpt",
    "list.ckpt",
    "dict.ckpt",
    "foreign.ckpt",
    "folder.ckpt",
    "policy",
]
NAMES = [
    "last",
    "best",
    "hpc",
    "registry:a",
    "https://127.0.0.1:1/a.ckpt",
    "s3://a/b.ckpt",
    "memory://a.ckpt",
]


class SetUp(GRPOCLI):
    """Sets a run up, with everything that is checked before the first rollout, and leaves it there."""

    made: dict[str, Any] | None = None

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """The parser, which takes most of the time, is made once."""
        if SetUp.made is None:
            super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
            made = ("parser", "_subcommand_parsers", "_subcommand_method_arguments")
            SetUp.made = {name: getattr(self, name) for name in made}
        vars(self).update(SetUp.made)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {"fit": GRPOCLI.subcommands()["fit"]}

    def _claim(self, run: RunConfig, resumes: bool) -> str:
        inside = run.folder.resolve().is_relative_to(Path.cwd())  # nothing is written elsewhere
        return super()._claim(run, resumes) if inside else run.name

    def _run_subcommand(self, subcommand: str) -> None:
        ckpt_path = self._settings.get("ckpt_path")
        self._check(ckpt_path)
        if ckpt_path is not None:
            self.trainer.fit(self.model, self.datamodule, ckpt_path=ckpt_path, weights_only=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with a run that can be set up, and no network to look for anything else."""
    import huggingface_hub.constants

    folder, before = tmp_path_factory.mktemp("run"), Path.cwd()
    save_policy(folder / "policy")
    make_checkpoints(folder)
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        yield folder
    assert Path.cwd() == before


def make_checkpoints(folder: Path) -> None:
    """Files that are no checkpoints, or none of ours."""
    (folder / "empty.ckpt").touch()
    (folder / "junk.ckpt").write_bytes(b"PK\x03\x04" + bytes(range(256)))
    (folder / "folder.ckpt").mkdir()
    torch.save([1, 2], folder / "list.ckpt")
    torch.save({}, folder / "dict.ckpt")
    foreign = {"state_dict": {"weight": torch.zeros(2)}, "pytorch-lightning_version": "2.0.0", "loops": {}}
    torch.save(foreign | {"callbacks": {}, "global_step": 1, "epoch": 0}, folder / "foreign.ckpt")


def config() -> dict[str, Any]:
    return {
        "trainer": {"accelerator": "cpu", "max_steps": 1, "logger": False, "enable_progress_bar": False},
        "model": {
            "policy": "policy",
            "rewards": [{"function": "lit_grpo.rewards.exact_match"}],
            "num_generations": 4,
            "sampling": {"max_tokens": 8},
        },
        "data": {"train": "rows.jsonl", "batch_size": 2},
        "throughput_monitor": {"stall_minutes": 0},  # no run goes on that could end its watch
    }


def set_up(settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str | None:
    """Set up; return the sentence that it ended in."""
    Path("config.yaml").write_text(yaml.safe_dump(settings, allow_unicode=True))
    try:
        run(["fit", "--config", "config.yaml"], SetUp)
    except SystemExit as ended:
        assert ended.code == 2
        said = capsys.readouterr().err
        assert said.count("error: ") == 1
        return re.sub(rf"\n(\(LIT_GRPO_TRACEBACK|  {re.escape(__file__)}).*", "", said[said.index("error: ") :])
    capsys.readouterr()
    return None


def is_a_sentence(said: str | None) -> bool:
    """Whether it is one, on one line; or nothing was said."""
    return said is None or ("\n" not in said.strip() and 10 < len(said) < 3000)


def fields(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """All that can be set, by name, apart from Lightning's own."""
    if SetUp.made is None:
        set_up(config(), capsys)
    assert SetUp.made is not None
    (choices,) = [action for action in SetUp.made["parser"]._actions if hasattr(action, "_name_parser_map")]
    names = {action.dest for action in choices._name_parser_map["fit"]._actions}
    return sorted(name for name in names if not name.startswith(LIGHTNINGS))


def put(settings: dict[str, Any], field: str, value: Any) -> None:
    *path, name = field.split(".")
    for key in path:
        settings = settings.setdefault(key, {})
        if not isinstance(settings, dict):
            return
    settings[name] = value


def test_a_run_in_which_all_is_well_is_set_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set_up(config(), capsys) is None
    assert len(fields(capsys)) > 80


@SETTINGS
@given(data=st.data())
def test_whatever_a_field_holds_the_outcome_is_a_sentence_or_a_run(
    data: st.DataObject, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = config()
    for _ in range(data.draw(st.integers(1, 2))):
        field = data.draw(st.sampled_from(fields(capsys)))
        if data.draw(st.integers(0, 9)) == 0:
            field += data.draw(st.sampled_from([".no_such_field", ".init_args", "_", "é"]))
        put(changed, field, data.draw(VALUES))
    said = set_up(changed, capsys)
    assert is_a_sentence(said) and "\x1b" not in str(said), said


@SETTINGS
@given(path=st.sampled_from(FILES + NAMES) | VALUES)
def test_whatever_is_to_be_resumed_the_outcome_is_a_sentence(
    path: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = set_up(config() | {"ckpt_path": path}, capsys)
    assert is_a_sentence(said), said
    assert said is not None or path in (None, "null", "none", ""), path


CELLS = st.recursive(
    st.one_of(ODD, st.text(alphabet="0123456789+-*=# abc", max_size=40)),
    lambda cells: st.one_of(st.lists(cells, max_size=3), st.dictionaries(st.text(max_size=6), cells, max_size=3)),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name"]), CELLS, max_size=3)
    | st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", ""]), "content": st.text(max_size=9)}
    ),
    max_size=3,
)
ROWS = st.dictionaries(st.sampled_from(["prompt", "answer", "question", "\n", ""]), CELLS | MESSAGES, max_size=3)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"unusable_rows": "drop"},
    {"template": "{question}="},
    {"columns": {"answer": "question"}},
    {"system_prompt": "1", "chat_template": True},
    {"chat_template": True, "continue_final_message": True, "unusable_rows": "drop"},
]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture(scope="module")
def policy(folder: Path) -> tuple[Any, Any]:
    """The policy of the folder, with a chat template."""
    tokenizer = load_tokenizer("policy")
    tokenizer.chat_template = TEMPLATE
    return load_policy("policy"), tokenizer


def read(policy: Any, train: Any, options: dict[str, Any]) -> str | None:
    """Read data; return the sentence that it ended in."""
    data = PromptDataModule(policy, train=train, batch_size=1, **options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rows that are left out are named
            data.setup("fit")
    except ValueError as error:
        return one_sentence(str(error))
    prompts = data.prompts["train"]
    assert prompts and all(prompt.token_ids and isinstance(prompt.text, str) for prompt in prompts)
    return None


@SETTINGS
@given(rows=st.lists(ROWS | CELLS, max_size=4), options=st.sampled_from(OPTIONS))
def test_whatever_rows_hold_the_outcome_is_a_sentence_or_prompts(
    rows: list[Any], options: dict[str, Any], policy: Any
) -> None:
    said = read(policy, rows, options)
    assert is_a_sentence(said), said


JUNK = [b"", b"\xff\xfe", b"\x00", b"\xed\xa0\x80", b"NaN", b'"', b"[" * 99999]


def torn(content: bytes, cut: int, junk: bytes) -> bytes:
    """A file that ends early, with something in its middle that belongs elsewhere."""
    cut %= len(content) + 1
    return content[: cut // 2] + junk + content[cut // 2 : cut]


@SETTINGS
@given(
    rows=st.lists(ROWS, min_size=1, max_size=3),
    cut=st.integers(0, 10**6),
    junk=st.binary(max_size=6) | st.sampled_from(JUNK),
    suffix=st.sampled_from([".jsonl", ".json", ".csv", ".parquet"]),
    whole=st.booleans(),
)
def test_whatever_a_file_holds_the_outcome_is_a_sentence_or_prompts(
    rows: list[Any], cut: int, junk: bytes, suffix: str, whole: bool, policy: Any
) -> None:
    lines = [json.dumps(row) for row in rows]
    text = f"[{','.join(lines)}]" if suffix == ".json" else "\n".join(lines)
    content = text.encode()
    path = Path(f"fuzzed{suffix}")
    path.write_bytes(content if whole else torn(content, cut, junk))
    said = read(policy, str(path), {"unusable_rows": "drop"})
    assert is_a_sentence(said), said
