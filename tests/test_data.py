import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lit_grpo.budgets.history import Record
from lit_grpo.budgets.prompts import PromptChooser
from lit_grpo.data.loaders import EvalLoader, PromptLoader
from lit_grpo.data.module import SPLITS_OF_STAGE, PromptDataModule
from lit_grpo.data.sources import RowSource
from lit_grpo.methods.greso import Greso
from lit_grpo.plugins import Plugin
from lit_grpo.types import Prompt, PromptBatch

WORDS = [
    *("<unk>", "<eos>", "[user]", "[system]", "[bot]", "what", "is", "one", "two", "plus", "?", "answer", ":"),
    *("{{b}", "{{}", "3", "{b}", "{}", "[assistant]"),
]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}[bot]{% endif %}{% if shout is defined %} ?{% endif %}"
)
Step = list[tuple[str, int]]


class Rows(RowSource):
    def __init__(self, *rows: Any) -> None:
        self.all_rows = rows

    def rows(self) -> Iterator[Any]:
        yield from self.all_rows


def save_tokenizer(folder: Path, chat_template: str | None = None, appends_eos: bool = False) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if appends_eos:
        words.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("chat"), CHAT_TEMPLATE, appends_eos=True)


def prompts_of(policy: str, *rows: Any, **options: Any) -> list[Prompt]:
    options.setdefault("batch_size", 1)
    data = PromptDataModule(policy, train=Rows(*rows), **options)
    data.setup("fit")
    return data.prompts["train"]


def words_of(prompt: Prompt) -> str:
    return " ".join(WORDS[token] for token in prompt.token_ids)


def numbered(count: int) -> list[Prompt]:
    return [Prompt(f"train/{number}", (number,), str(number)) for number in range(count)]


def drawn(batch: PromptBatch) -> Step:
    return [(prompt.prompt_id, prompt.visit) for prompt in batch.prompts]


def draw(loader: PromptLoader, num_batches: int) -> list[Step]:
    steps: list[Step] = []
    while len(steps) < num_batches:
        for batch in loader:
            batch.trained = True
            steps.append(drawn(batch))
            if len(steps) == num_batches:
                break
    return steps


# Rows to prompts


def test_text_becomes_a_prompt_with_its_row_number_and_columns(plain: str) -> None:
    (prompt,) = prompts_of(plain, {"prompt": "one plus two ?", "answer": "3"})
    assert prompt == Prompt(
        "train/0", (7, 9, 8, 10), "one plus two ?", {"prompt": "one plus two ?", "answer": "3"}, visit=0
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "one ?"),
        ({"chat_template": True}, "[user] one ? [bot]"),
        ({"system_prompt": "answer"}, "[system] answer [user] one ? [bot]"),
        ({"chat_template": True, "chat_template_kwargs": {"shout": True}}, "[user] one ? [bot] ?"),
    ],
)
def test_text_is_rendered_as_chat_when_asked_for(chat: str, options: dict[str, Any], expected: str) -> None:
    (prompt,) = prompts_of(chat, {"prompt": "one ?"}, **options)
    assert words_of(prompt) == expected


def test_a_conversation_that_ends_in_an_assistant_message_is_continued_where_asked(chat: str) -> None:
    begun = [{"role": "user", "content": "what is one ?"}, {"role": "assistant", "content": "answer :"}]
    rows = [{"prompt": begun}, {"prompt": begun[:1]}]
    prompts = prompts_of(chat, *rows, continue_final_message=True)
    assert [prompt.text.split("?")[1].split() for prompt in prompts] == [["[assistant]", "answer", ":"], ["[bot]"]]


def test_a_batch_larger_than_the_data_is_refused(plain: str) -> None:
    with pytest.raises(ValueError) as caught:
        prompts_of(plain, {"prompt": "one"}, {"prompt": "two"}, batch_size=3)
    assert str(caught.value) == (
        "data.batch_size is 3, but data.train has only 2 prompts, so that a step would repeat some; "
        "set it to 2 or less, or give more prompts."
    )


def test_template_gives_values_as_they_are(plain: str) -> None:
    (prompt,) = prompts_of(plain, {"a": "{b} {{", "n": 3}, template="{{{a}}} {n}")
    assert prompt.text == "{{b} {{} 3"


def test_columns_are_renamed_for_the_rewards(plain: str) -> None:
    row = {"prompt": "one", "solution": "1", "answer": "one is one"}
    (prompt,) = prompts_of(plain, row, columns={"answer": "solution", "explanation": "answer"})
    assert prompt.columns == {"prompt": "one", "answer": "1", "explanation": "one is one"}


def test_prompt_ids_stay_when_rows_are_dropped(plain: str) -> None:
    rows = [{"prompt": "one"}, {"prompt": ""}, {"prompt": "two"}]
    with pytest.warns(UserWarning, match=r"1 of the 3 rows of Rows is unusable .*row 1 has an empty prompt"):
        prompts = prompts_of(plain, *rows, unusable_rows="drop")
    assert [prompt.prompt_id for prompt in prompts] == ["train/0", "train/2"]


# Bad rows


@pytest.mark.parametrize(
    ("row", "options", "reason"),
    [
        ({"text": "one"}, {}, "row 1 has no column 'prompt' (it has 'text')"),
        ({}, {}, "row 1 has no column 'prompt' (it has none)"),
        ({"prompt": None}, {}, "row 1 has no value in column 'prompt'"),
        ({"prompt": " \n"}, {}, "row 1 has an empty prompt"),
        ({"prompt": []}, {}, "row 1 has an empty prompt"),
        ({"prompt": [{"role": "user", "content": ""}]}, {}, "row 1 has an empty prompt"),
        ({"prompt": 7}, {}, "row 1 has a prompt of type int, neither text nor a list of chat messages"),
        ({"prompt": ["one"]}, {}, 'row 1 has a chat message that is not {"role": text, "content": text}'),
        ({"prompt": [{"role": "user", "content": None}]}, {}, "row 1 has a chat message that is not"),
        ({"prompt": "one twelve"}, {}, "row 1 has a prompt with characters that the tokenizer does not know"),
        ({"prompt": "<eos>"}, {}, "row 1 has a prompt that the tokenizer turns into no tokens"),
        (
            {"prompt": "one plus two ?"},
            {"max_prompt_tokens": 3},
            "row 1 has a prompt of 4 tokens, more than max_prompt_tokens=3",
        ),
        ({"prompt": [{"role": "tool", "content": "one"}]}, {}, "row 1 is refused by the chat template: no tools here"),
        (
            {"prompt": [{"role": "user", "content": "one"}]},
            {"chat_template": False},
            "row 1 holds chat messages, which chat_template: false cannot render",
        ),
        (
            {"prompt": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]},
            {},
            "row 1 ends in an assistant message, which would be answered; set data.cut_answers to true to leave it "
            "out, or data.continue_final_message to have it continued",
        ),
        (
            {"prompt": [{"role": "system", "content": "one"}]},
            {"system_prompt": "two"},
            "row 1 begins with a system message of its own beside system_prompt",
        ),
        ({"p": "one"}, {"template": "{prompt} ?"}, "row 1 has no column 'prompt' (it has 'p')"),
        ({"prompt": None}, {"template": "{prompt} ?"}, "row 1 has no value in column 'prompt'"),
        ({"prompt": " "}, {"template": "{prompt} "}, "row 1 has an empty prompt"),
    ],
)
def test_unusable_row_is_refused_with_its_number_and_reason(
    chat: str, row: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError) as error:
        prompts_of(chat, {"prompt": "one"}, row, **options)
    assert reason in str(error.value)
    assert str(error.value).startswith("data.train: 1 of the 2 rows of Rows is unusable (rows count from 0): ")
    assert str(error.value).endswith("; mend them, or set data.unusable_rows to drop to go on without them.")


def test_report_shows_five_rows_and_counts_the_rest(plain: str) -> None:
    rows = [{"prompt": "one"}] + [{"prompt": ""}] * 12
    expected = r"12 of the 13 rows .*: row 1 has an empty prompt, and likewise rows 2, 3, 4, 5 and 7 more; mend"
    with pytest.raises(ValueError, match=expected):
        prompts_of(plain, *rows)
    with pytest.raises(ValueError, match=r"prompt, and likewise row 3; row 2 has no value in column 'prompt'; mend"):
        prompts_of(plain, *rows[:2], {"prompt": None}, {"prompt": ""})
    with pytest.raises(ValueError, match=r"type tuple.*; and 3 more; no row is left"):
        prompts_of(plain, *({"prompt": each} for each in ("1", 1, b"1", frozenset(), (), 1.0, True, {})))


def test_column_that_is_to_be_renamed_and_lacks_is_an_error(plain: str) -> None:
    lacks = r"'answer' from column 'solution', which row 0 of Rows lacks; it has 'prompt', 'result'\.$"
    with pytest.raises(ValueError, match=rf"^data\.train: data\.columns takes {lacks}"):
        prompts_of(plain, {"prompt": "one", "result": "1"}, columns={"answer": "solution"})


@pytest.mark.parametrize("options", [{}, {"system_prompt": "two"}, {"chat_template": True}])
def test_chat_with_a_tokenizer_that_has_no_template_is_an_error(plain: str, options: dict[str, Any]) -> None:
    row = {"prompt": "one" if options else [{"role": "user", "content": "one"}]}
    with pytest.raises(ValueError, match=r"chat template, and the tokenizer of data\.policy has none; choose"):
        prompts_of(plain, row, **options)


# Arguments and stages


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "{a.b}"}, "data.template '{a.b}' may hold only plain columns"),
        ({"template": "{a[0]}"}, "data.template '{a[0]}' may hold only plain columns"),
        ({"template": "{a!r}"}, "data.template '{a!r}' may hold only plain columns"),
        ({"template": "{a:{b}}"}, "data.template '{a:{b}}' may hold only plain columns"),
        ({"template": "{}"}, "data.template '{}' may hold only plain columns"),
        ({"template": "{a"}, "data.template '{a' is malformed: expected '}' before end of string"),
        ({"template": "one ?"}, "data.template 'one ?' names no column"),
        (
            {"chat_template": False, "system_prompt": "x"},
            "data.system_prompt needs the tokenizer's chat template, but data.chat_template false leaves it out; set",
        ),
        ({"chat_template": False, "chat_template_kwargs": {"x": 1}}, "data.chat_template false leaves it out; set"),
        ({"chat_template_kwargs": {"tokenize": False}}, "data.chat_template_kwargs may not set tokenize"),
    ],
)
def test_bad_argument_is_refused_before_anything_is_read(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        PromptDataModule("no such policy", **options)
    assert message in str(error.value)


@pytest.mark.parametrize("stage", SPLITS_OF_STAGE)
def test_stage_without_its_source_names_the_field(plain: str, stage: str) -> None:
    split = {"fit": "train", "validate": "validation"}.get(stage, stage)
    for given in (stage, TrainerFn(stage)):  # as Lightning gives it
        with pytest.raises(ValueError, match=rf"^data\.{split} is not set, and {stage} needs it; give it"):
            PromptDataModule(plain).setup(given)


def test_setup_reads_only_what_the_stage_needs_and_only_once(plain: str, tmp_path: Path) -> None:
    files = {split: tmp_path / f"{split}.jsonl" for split in ("train", "validation", "test", "predict")}
    for path in files.values():
        path.write_text(json.dumps({"prompt": "one"}) + "\n")
    sources: dict[str, Any] = {split: str(path) for split, path in files.items()}
    data = PromptDataModule(plain, **sources, batch_size=1)
    data.setup("validate")
    assert list(data.prompts) == ["validation"]
    data.setup("fit")
    assert list(data.prompts) == ["validation", "train"]
    before = data.prompts["train"]
    files["train"].unlink()
    data.setup("fit")
    assert data.prompts["train"] is before


# The stream of training prompts


def test_stream_draws_every_prompt_once_an_epoch_on_disjoint_ranks() -> None:
    rng = random.Random(0)
    for _ in range(40):
        num_prompts, batch_size, world_size = rng.randint(1, 30), rng.randint(1, 7), rng.randint(1, 4)
        seed, num_steps = rng.randint(0, 9), rng.randint(1, 25)
        ranks = [
            draw(PromptLoader(numbered(num_prompts), batch_size, rank, world_size, seed), num_steps)
            for rank in range(world_size)
        ]
        assert all(len(step) == batch_size for steps in ranks for step in steps)
        stream = [place for steps in zip(*ranks, strict=True) for step in steps for place in step]
        assert [visit for _, visit in stream] == [index // num_prompts for index in range(len(stream))]
        assert max(Counter(stream).values()) == 1
        whole = PromptLoader(numbered(num_prompts), 1, seed=seed)
        assert stream == [place for step in draw(whole, len(stream)) for place in step]


def test_batch_is_consumed_once_trained_or_passed_over() -> None:
    loader = PromptLoader(numbered(10), 4)
    batches = iter(loader)
    assert loader.state_dict()["prompts_consumed"] == 0
    first = next(batches)
    assert loader.state_dict()["prompts_consumed"] == 0
    first.trained = True
    assert loader.state_dict()["prompts_consumed"] == 4
    next(batches)
    assert loader.state_dict()["prompts_consumed"] == 4
    next(iter(loader))
    assert loader.state_dict()["prompts_consumed"] == 8


def chooser_of(**records: Record) -> PromptChooser:
    chooser = PromptChooser(Greso(), seed=0)
    chooser.history.records = {f"train/{name[1:]}": record for name, record in records.items()}
    return chooser


FLAT = {f"n{number}": Record(4, num_hard=2) for number in range(0, 10, 2)}


def test_prompts_that_are_passed_over_are_counted_and_come_again() -> None:
    loader = PromptLoader(numbered(10), 3, seed=5, chooser=chooser_of(**FLAT))
    whole = [place for step in draw(PromptLoader(numbered(10), 1, seed=5), 400) for place in step]
    steps = draw(loader, 80)
    asked = [place for step in steps for place in step]
    taken = whole.index(asked[-1]) + 1
    assert loader.take_skipped() == taken - len(asked) > 0 and loader.take_skipped() == 0
    assert loader.state_dict()["prompts_consumed"] == taken
    assert [place for place in whole[:taken] if place in asked] == asked  # in the stream's order
    skipped = set(whole[:taken]) - set(asked)
    assert {name for name, _ in skipped} == {f"train/{number}" for number in range(0, 10, 2)}
    even = [place for place in whole[:taken] if int(place[0][6:]) % 2 == 0]
    assert len(skipped) / len(even) == pytest.approx(0.75, abs=0.15)  # 1 - 0.5^2


def test_a_rule_that_asks_all_changes_nothing_and_ranks_share_what_is_asked() -> None:
    assert draw(PromptLoader(numbered(7), 2, chooser=chooser_of()), 9) == draw(PromptLoader(numbered(7), 2), 9)
    one = draw(PromptLoader(numbered(10), 4, chooser=chooser_of(**FLAT)), 10)
    ranks = [draw(PromptLoader(numbered(10), 2, rank, 2, chooser=chooser_of(**FLAT)), 10) for rank in (0, 1)]
    assert [first + second for first, second in zip(*ranks, strict=True)] == one


def test_what_a_rule_remembers_goes_on_with_the_stream() -> None:
    loader, resumed = (PromptLoader(numbered(10), 3, chooser=chooser_of(**FLAT)) for _ in range(2))
    assert loader.chooser is not None
    draw(loader, 4)
    loader.chooser.state = {"easy": 0.3, "hard": 0.8}
    resumed.load_state_dict(loader.state_dict())
    assert draw(resumed, 6) == draw(loader, 6) and resumed.state_dict() == loader.state_dict()
    by_another = PromptLoader(numbered(10), 3)
    by_another.load_state_dict(loader.state_dict())  # which has no rule


@dataclass
class Nobody(Plugin):
    def prompt_chance(self, prompt: object, record: object, state: object) -> float:
        return 0.0


def test_a_rule_that_asks_hardly_anybody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_grpo.data.loaders.MOST_SKIPPED", 1000)
    loader = PromptLoader(numbered(10), 2, chooser=PromptChooser(Nobody(), 0))
    with pytest.raises(ValueError, match=r"rollout\.plugins asks none of 1000 prompts in a row"):
        draw(loader, 1)


def test_batch_size_and_ranks_may_change_on_resume() -> None:
    whole = [place for step in draw(PromptLoader(numbered(7), 1), 20) for place in step]
    loader = PromptLoader(numbered(7), 3, world_size=2)
    draw(loader, 2)
    resumed = PromptLoader(numbered(7), 4)
    resumed.load_state_dict(loader.state_dict())
    assert [place for step in draw(resumed, 2) for place in step] == whole[12:20]


def test_other_content_of_as_many_prompts_is_an_error_on_resume() -> None:
    prompts = [replace(prompt, columns={"answer": "1"}) for prompt in numbered(3)]
    state = PromptLoader(prompts, 2).state_dict()
    PromptLoader([replace(prompt) for prompt in prompts], 1).load_state_dict(state)
    changes: list[dict[str, Any]] = [{"token_ids": (7,)}, {"columns": {"answer": "2"}}]
    for change in changes:
        others = [*prompts[:2], replace(prompts[2], **change)]
        with pytest.raises(ValueError, match=r"stream of prompts: digest_of_prompts was \w+ and is now \w+; restore"):
            PromptLoader(others, 2).load_state_dict(state)


def test_other_prompts_or_seed_on_resume_are_an_error() -> None:
    state = PromptLoader(numbered(7), 2, seed=1).state_dict()
    with pytest.raises(ValueError, match=r"seed was 1 and is now 2, num_prompts was 7 and is now 8; restore"):
        PromptLoader(numbered(8), 2, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"shuffle was True and is now False; restore"):
        PromptLoader(numbered(7), 2, seed=1, shuffle=False).load_state_dict(state)


def test_evaluation_takes_each_prompt_once_in_equally_many_batches_a_rank() -> None:
    rng = random.Random(0)
    for _ in range(40):
        num_prompts, batch_size, world_size = rng.randint(1, 30), rng.randint(1, 7), rng.randint(1, 4)
        loaders = [EvalLoader(numbered(num_prompts), batch_size, rank, world_size) for rank in range(world_size)]
        ranks = [[drawn(batch) for batch in loader] for loader in loaders]
        assert {len(batches) for batches in ranks} == {len(loader) for loader in loaders} == {len(ranks[0])}
        assert all(len(batch) <= batch_size for batches in ranks for batch in batches)
        assert all(ranks[0])
        seen = [name for batches in ranks for batch in batches for name, _ in batch]
        assert sorted(seen) == sorted(prompt.prompt_id for prompt in numbered(num_prompts))


# Under a real Trainer


class Recorder(LightningModule):
    """Notes the prompts of each step that it finishes; fails in the middle of step ``fails_at``."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(1, 1)
        self.fails_at = fails_at
        self.steps: list[Step] = []
        self.evaluated: list[Step] = []

    def training_step(self, batch: PromptBatch) -> None:
        if self.global_step == self.fails_at:
            raise RuntimeError("killed")
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        optimizer.step()
        self.steps.append(drawn(batch))
        batch.trained = True

    def test_step(self, batch: PromptBatch) -> None:
        self.evaluated.append(drawn(batch))

    def validation_step(self, batch: PromptBatch) -> None:
        """The batch is only read."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAt(Callback):
    """Saves a checkpoint in ``hook`` once ``step`` steps are done."""

    def __init__(self, path: Path, hook: str, step: int) -> None:
        self.path = path
        self.step = step
        setattr(self, hook, self.save)

    def save(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def rows(count: int) -> Rows:
    return Rows(*({"prompt": "one"} for _ in range(count)))


def train(
    policy: str,
    *callbacks: Callback,
    fails_at: int | None = None,
    ckpt_path: Path | None = None,
    **limits: Any,
) -> list[Step]:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu", devices=1, enable_model_summary=False, callbacks=list(callbacks), **quiet, **limits
    )
    recorder = Recorder(fails_at)
    data = PromptDataModule(policy, train=rows(10), validation=rows(3), batch_size=4)
    try:
        trainer.fit(recorder, datamodule=data, ckpt_path=ckpt_path)
    except RuntimeError as error:
        assert str(error) == "killed"
    return recorder.steps


@pytest.mark.parametrize("limits", [{"max_steps": 7}, {"max_epochs": 4}])
@pytest.mark.parametrize(
    ("hook", "step"),
    [*(("on_train_batch_end", step) for step in (1, 2, 4, 5)), ("on_train_epoch_end", 4), ("on_validation_end", 4)],
)
def test_resumed_fit_goes_on_with_the_next_prompts(
    plain: str, tmp_path: Path, hook: str, step: int, limits: dict[str, Any]
) -> None:
    saved = tmp_path / "a.ckpt"
    steps = train(plain, SaveAt(saved, hook, step), **limits)
    assert steps == draw(PromptLoader(numbered(10), 4), limits.get("max_steps", 8))
    assert train(plain, ckpt_path=saved, **limits) == steps[step:]


@pytest.mark.parametrize("fails_at", [0, 3, 4])
def test_step_that_was_cut_off_is_done_again(plain: str, tmp_path: Path, fails_at: int) -> None:
    saved = tmp_path / "a.ckpt"
    before = train(plain, SaveAt(saved, "on_exception", fails_at), fails_at=fails_at, max_steps=7)
    after = train(plain, ckpt_path=saved, max_steps=7)
    assert before + after == train(plain, max_steps=7)
    assert len(before) == fails_at


def test_second_fit_of_one_trainer_goes_on_and_of_another_begins_anew(plain: str) -> None:
    data = PromptDataModule(plain, train=rows(10), batch_size=4)
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "barebones": True}
    recorder, trainer = Recorder(), Trainer(**options)
    trainer.fit(recorder, datamodule=data)
    assert trainer.fit_loop.max_epochs == 2
    trainer.fit_loop.max_epochs = 3
    trainer.fit(recorder, datamodule=data)
    assert recorder.steps == draw(PromptLoader(numbered(10), 4), 6)
    other = Recorder()
    Trainer(**options).fit(other, datamodule=data)
    assert other.steps == recorder.steps[:4]


def test_checkpoint_of_other_training_prompts_can_be_tested(plain: str, tmp_path: Path) -> None:
    saved = tmp_path / "a.ckpt"
    train(plain, SaveAt(saved, "on_train_batch_end", 1), max_steps=1)
    data = PromptDataModule(plain, train=rows(9), test=rows(1))
    data.setup("fit")
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    recorder = Recorder()
    trainer.test(recorder, datamodule=data, ckpt_path=saved, verbose=False)
    assert recorder.evaluated == [[("test/0", 0)]]
    with pytest.raises(ValueError, match=r"num_prompts was 10 and is now 9; restore the data settings"):
        trainer.fit(recorder, datamodule=data, ckpt_path=saved)
