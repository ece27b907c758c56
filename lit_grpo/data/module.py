"""The DataModule: rows of any source become prompts, and prompts become batches."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from lightning import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.budgets.prompts import PromptChooser
from lit_grpo.data.chat import EndlessTemplate, UnusableRow
from lit_grpo.data.examples import Example, SourceSpec, Turns, render_example
from lit_grpo.data.loaders import EvalLoader, PromptLoader, row_digests
from lit_grpo.data.mixture import DATASET, MixtureWeights
from lit_grpo.data.rendering import Converses, PromptRenderer, column_of
from lit_grpo.data.sources import FileRows, HubRows, PolicyFault, Row, RowSource, check_size, make_source, naming
from lit_grpo.data.writing import PromptWriter, check_rewriting, rewritten
from lit_grpo.faults.differing_ranks import check_alike, check_rows, of_run
from lit_grpo.limits import Count, Limit, checks_arguments
from lit_grpo.policy.loading import as_loaded, load_tokenizer, load_vision, longest_sequence
from lit_grpo.policy.named import TINY
from lit_grpo.process.terminal import counted, listed, say, warn
from lit_grpo.ranks import Ranks
from lit_grpo.settings import takes_dicts
from lit_grpo.types import Prompt, own_copy

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from transformers import PreTrainedTokenizerBase

    from lit_grpo.plugins import Plugin


SPLITS_OF_STAGE = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("predict",),
}
SPLITS = ("train", "validation", "test", "predict")
NUM_ROWS_SHOWN = 5
MOST_DATASETS = 100
TELL_EVERY_S = 10.0
"""Seconds of reading rows after which their number is shown, again and again."""
LARGE_FILE = 256 * 2**20
"""A file with more bytes is named before it is read, which takes long."""


class PromptDataModule(LightningDataModule):
    """Prompts for training, validation, test and predict, from files, Hugging Face datasets or Python.

    A source is the path of a .jsonl, .json, .csv or .parquet file, a folder written by ``save_to_disk``,
    the id of a dataset on the Hugging Face hub, or a :class:`lit_grpo.data.sources.RowSource` by class path. From
    Python also an object that :class:`lit_grpo.data.sources.GivenRows` reads, such as a list of dicts, and for
    ``policy`` a loaded model with its tokenizer.

    Args:
        policy: The policy whose tokenizer renders the prompts: ``tiny``, a folder or a hub id.
        train: Source of the training prompts.
        validation: Source of the validation prompts; without it ``fit`` does not validate.
        test: Source of the test prompts.
        predict: Source of the prompts to complete with ``predict``.
        batch_size: Number of prompts per training iteration and rank; over all ranks at most the training prompts.
        eval_batch_size: Number of prompts per batch and rank in validation, test and predict.
        prompt_column: Column that holds the prompt, as text or as a list of chat messages
            (``{"role": ..., "content": ...}``). Content may be in parts of text (``{"type": "text", "text": ...}``),
            which are joined; earlier messages may hold tool calls and their answers.
        template: Text that makes the prompt of several columns, for instance
            ``"Question: {question} Answer:"``; ``prompt_column`` is then unused.
        system_prompt: A system message to begin every conversation with.
        chat_template: Render prompts with the tokenizer's chat template. By default it renders prompts that are lists
            of messages, and all prompts if ``system_prompt`` is set.
        chat_template_kwargs: Variables for the chat template, for instance ``enable_thinking: false``.
        continue_final_message: Continue conversations that end in an assistant message; they are unusable otherwise.
        cut_answers: Leave the last message of a conversation out of its prompt if it is the assistant's: the row is an
            example, whose answer that message is. A column of answers needs no such setting.
        split_special_tokens: Encode control tokens that a row's text spells, such as ``<|im_end|>``, as plain
            characters. By default they become control tokens, and a warning counts the rows. Earlier turns of the
            assistant are left as they are. Text from tools, environments and agents is always encoded as plain
            characters.
        image_column: Column with a row's images, one or a list, for a policy that sees images (``model.vision``). An
            image is a file, its bytes, an image of Pillow, or what ``datasets.Image`` gives. It stands before the first
            user message, or in place of the parts ``{"type": "image"}`` of messages; these may hold images themselves.
        columns: New names of columns for reward functions: ``{answer: solution}`` passes the column ``solution`` as
            ``answer``. Prompts use the old names.
        max_prompt_tokens: Max tokens per prompt; a longer prompt is unusable, and prompts are never cut.
        unusable_rows: Handling of rows without a usable prompt (missing, empty, malformed or too long): an error
            (``refuse``), or left out with a warning (``drop``).
        shuffle: Shuffle the training prompts in each epoch.
        seed: Seed of the shuffling.
        mixture: How often each data set of ``train`` is drawn, if its rows are of several data sets, which the column
            ``dataset`` names; ``{}`` draws all rows equally often. :class:`lit_grpo.data.Mixture` puts files together.
            Metrics are then logged for each data set too, and reward functions and plug-ins can be limited to some.
    """

    @takes_dicts
    @checks_arguments("data.")
    def __init__(
        self,
        policy: str = TINY,
        train: str | RowSource | None = None,
        validation: str | RowSource | None = None,
        test: str | RowSource | None = None,
        predict: str | RowSource | None = None,
        batch_size: Count = 8,
        eval_batch_size: Count = 64,
        prompt_column: str = "prompt",
        template: str | None = None,
        system_prompt: str | None = None,
        chat_template: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        continue_final_message: bool = False,
        cut_answers: bool = False,
        split_special_tokens: bool = False,
        image_column: str | None = None,
        columns: dict[str, str] | None = None,
        max_prompt_tokens: int = 512,
        unusable_rows: Literal["refuse", "drop"] = "refuse",
        shuffle: bool = True,
        seed: Annotated[int, Limit(ge=0, le=2**63 - 1)] = 0,
        mixture: MixtureWeights | None = None,
    ) -> None:
        super().__init__()
        self.mixture = mixture
        self.policy = as_loaded(policy)
        self.sources = {"train": train, "validation": validation, "test": test, "predict": predict}
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.columns = columns or {}
        self.unusable_rows = unusable_rows
        self.shuffle = shuffle
        self.seed = seed
        self.renderer = PromptRenderer(
            prompt_column,
            template,
            system_prompt,
            chat_template,
            chat_template_kwargs,
            max_prompt_tokens,
            continue_final_message,
            split_special_tokens,
            cut_answers,
            image_column,
        )
        self.prompts: dict[str, list[Prompt]] = {}
        self.rewritten: list[Prompt] = []  # of training prompts, the longest and the one with the largest token
        self._read_for_plugins: list[list[Example]] = []
        self._rows: dict[str, Row] = {}  # what training and validation prompts are made of, by their ids
        self._train_loader: PromptLoader | None = None

    def setup(self, stage: str) -> None:
        """Read and render the prompts that ``stage`` needs, once.

        Raises:
            ValueError: A source is not set, or has rows that are unusable, or the ranks of the run were given different
            settings or have read different rows.
        """
        splits = SPLITS_OF_STAGE[stage]
        if self.sources[splits[0]] is None:
            command = getattr(stage, "value", stage)  # Lightning gives a TrainerFn
            raise ValueError(
                f"data.{splits[0]} is not set, and {command} needs it; give it a file, a folder, a dataset id "
                "or the class path of a RowSource."
            )
        if not self._is_shared:
            self._converse()
            self._read(splits)
        else:
            ranks = Ranks()
            check_alike(ranks, self._given(stage))
            self._converse()
            ranks.together(lambda: self._read(splits))
            check_rows(ranks, {f"data.{split}": row_digests(self.prompts.get(split, ())) for split in splits})
        going_on = self.trainer is not None and self.trainer.global_step > 0
        if stage == "fit" and not (going_on and self._train_loader):
            self._train_loader = self._new_train_loader()

    @property
    def _is_shared(self) -> bool:
        return self.trainer is not None and Ranks().size > 1

    def _given(self, stage: str) -> dict[str, object]:
        """Return what every rank must be given alike, by name."""
        given: dict[str, object] = {
            "the stage": stage,
            "data.batch_size": self.batch_size,
            "data.eval_batch_size": self.eval_batch_size,
            "data.shuffle": self.shuffle,
            "data.seed": self.seed,
            "data.mixture": self.mixture,
        }
        given |= {f"data.{split}": "set" if self.sources[split] is not None else None for split in SPLITS}
        return given | of_run(self.trainer, self.trainer.lightning_module)  # pyrefly: ignore[missing-attribute]

    def _read(self, splits: Iterable[str]) -> None:
        named = {split: self.sources[split] for split in splits if split not in self.prompts}
        sources = {split: _source_of(split, source) for split, source in named.items() if source is not None}
        for split, source in sources.items():
            with naming(f"data.{split}"):
                self.prompts[split] = self._load(split, source)

    def _converse(self) -> None:
        """Render prompts for what goes on with their conversations, where a callback has it."""
        callbacks: list[Any] = [] if self.trainer is None else self.trainer.callbacks  # pyrefly: ignore[missing-attribute]
        found = [callback.conversing for callback in callbacks if isinstance(callback, Converses)]
        conversing = next((each for each in found if each is not None), None)
        vision, of_rows = self.renderer.vision, self.renderer.image_column is not None
        module = getattr(self.trainer, "lightning_module", None)
        observes = conversing is not None and getattr(module, "vision", "none") != "none"
        if vision is None and (of_rows or observes):
            vision = load_vision(self.policy, self._tokenizer)
        if of_rows:
            self.renderer = replace(self.renderer, vision=vision)
        if conversing is not None:
            if self.renderer.chat_template is False:
                raise ValueError(
                    "data.chat_template is false, and environments and tools go on with a conversation; leave it out."
                )
            renderer = self.renderer
            options = renderer.chat_template_kwargs or {}
            conversing.prepare(self._tokenizer, options, renderer.split_special_tokens, vision)
        self.renderer = replace(self.renderer, conversing=conversing)

    def plug_in(self, rule: Plugin | None, rewriting: Sequence[Plugin], on_demand: bool) -> None:
        """Let plug-ins select and rewrite training prompts, and draw them on demand.

        Args:
            rule: The plug-in that selects the prompts to sample; None for all prompts.
            rewriting: The plug-ins that say what they are asked with; without any, as their rows say.
            on_demand: Whether a session draws prompts as it needs them, and batches come empty.

        Raises:
            ValueError: A prompt cannot be rewritten, or none is; or the rule needs a column that the prompts lack.
        """
        loader = self.train_dataloader()
        chooser = loader.chooser  # of an earlier call of fit, where the rule is the same
        if chooser is None or chooser.rule != rule:
            chooser = None if rule is None else PromptChooser(rule, self.seed, self.prompts["train"])
        rewrite = None
        if rewriting:
            writer = self.writer
            source = _source_of("train", self.sources["train"])
            self.rewritten = check_rewriting(rewriting, writer, self.prompts["train"], source.describe())
            rewrite = partial(rewritten, rules=rewriting, writer=writer)
        loader.plug_in(chooser, rewrite, on_demand)
        if self._is_shared:
            read = enumerate(self._read_for_plugins)
            check_rows(Ranks(), {f"data set {number} of rollout.plugins": row_digests(rows) for number, rows in read})

    def train_dataloader(self) -> PromptLoader:
        assert self._train_loader is not None, "setup('fit') comes before train_dataloader()"
        return self._train_loader

    def val_dataloader(self) -> EvalLoader | list[Any]:
        return self._eval_loader("validation") if "validation" in self.prompts else []

    def test_dataloader(self) -> EvalLoader:
        return self._eval_loader("test")

    def predict_dataloader(self) -> EvalLoader:
        return self._eval_loader("predict")

    def state_dict(self) -> dict[str, Any]:
        """The place in the training stream.

        Lightning keeps the state of the loader too, but gives it back only where an epoch was cut off:
        from a checkpoint at the end of an epoch the stream would begin again.
        """
        return {} if self._train_loader is None else self._train_loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        fitting = self.trainer is None or self.trainer.state.fn == "fit"
        if self._train_loader is not None and fitting:
            self._train_loader.load_state_dict(state_dict)

    @property
    def writer(self) -> PromptWriter:
        return PromptWriter(self.renderer, self._tokenizer, self._rows)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        try:
            return load_tokenizer(self.policy)
        except ValueError as error:
            raise PolicyFault(str(error)) from error

    def _new_train_loader(self) -> PromptLoader:
        rank, world_size = self._rank_and_world_size()
        if (num_prompts := len(self.prompts["train"])) < self.batch_size * world_size:
            ranks = f" on each of {world_size} ranks" if world_size > 1 else ""
            most = num_prompts // world_size
            remedy = f"set it to {most} or less, or give more prompts" if most else "give more prompts or fewer devices"
            raise ValueError(
                f"data.batch_size is {self.batch_size}{ranks}, but data.train has only {num_prompts} prompts, so that "
                f"a step would repeat some; {remedy}."
            )
        prompts, mixture = self.prompts["train"], self.mixture
        if mixture is not None:
            mixture.check([prompt.dataset for prompt in prompts])
        mixture = mixture if mixture and mixture.weights else None
        return PromptLoader(prompts, self.batch_size, rank, world_size, self.seed, self.shuffle, mixture=mixture)

    def _eval_loader(self, split: str) -> EvalLoader:
        return EvalLoader(self.prompts[split], self.eval_batch_size, *self._rank_and_world_size())

    def _rank_and_world_size(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _load(self, split: str, source: RowSource) -> list[Prompt]:
        prompts: list[Prompt] = []
        reasons: dict[int, str] = {}
        spelled: dict[int, list[str]] = {}
        for number, (place, row) in enumerate(_checked(source)):
            columns = _rename(row, self.columns, place)
            try:
                token_ids, text, messages, pictures = self.renderer.render(row, self._tokenizer)
            except UnusableRow as reason:
                reasons[number] = str(reason)
            except EndlessTemplate as error:
                raise ValueError(f"{place} {error}; mend the template, or the row.") from None
            else:
                if not self.renderer.split_special_tokens and (names := self.renderer.spelled(row, self._tokenizer)):
                    spelled[number] = names
                dataset = self._dataset_of(row, place, split) if self._is_mixed else ""
                prompt = Prompt(f"{split}/{number}", token_ids, text, columns, messages=messages, dataset=dataset)
                prompts.append(prompt if pictures is None else replace(prompt, pictures=pictures))
                if split in SPLITS_OF_STAGE["fit"]:
                    self._rows[prompts[-1].prompt_id] = row
        self._report(f"data.{split}", source, len(prompts), reasons)
        if split == "train" and self.renderer.vision is not None and not any(prompt.pictures for prompt in prompts):
            raise ValueError(
                f"no row of {source.describe()} has an image in column {self.renderer.image_column!r} or in its "
                "messages; name the column in data.image_column, or leave it out to train on texts alone."
            )
        if (number := len({prompt.dataset for prompt in prompts})) > MOST_DATASETS:
            raise ValueError(
                f"column {DATASET!r} of {source.describe()} names {number} data sets, and each has metrics of its own, "
                f"so that at most {MOST_DATASETS} are allowed; write the names of the data sets into it, or leave "
                "data.mixture out."
            )
        if spelled:
            names = list(dict.fromkeys(name for each in spelled.values() for name in each))
            rank_zero_only(warn)(
                f"data.{split}: {len(spelled)} of the {len(prompts)} prompts of {source.describe()} spell control "
                f"tokens ({', '.join(names[:NUM_ROWS_SHOWN])}{', ...' * (len(names) > NUM_ROWS_SHOWN)}; row "
                f"{min(spelled)} is "
                "the first, counted from 0), and the policy reads them as control tokens. Unless that is meant, set "
                "data.split_special_tokens to true, which encodes them as plain characters."
            )
        return prompts

    @property
    def _is_mixed(self) -> bool:
        train = self.sources["train"]
        return self.mixture is not None or (isinstance(train, RowSource) and train.names_datasets)

    def _dataset_of(self, row: Row, place: str, split: str) -> str:
        name = row.get(DATASET)
        if name is None and split == "predict":  # prompts that nobody has scored may be of none
            return ""
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"{place} has {name!r} in column {DATASET!r}, which names the data set of each row, because "
                "data.mixture is set or data.train is a Mixture; give a name, or leave data.mixture out."
            )
        return name

    def answered(self, split: str, column: str, turns: Turns = "all", datasets: Collection[str] = ()) -> list[Example]:
        """See :class:`lit_grpo.data.examples.AnsweredData`."""
        source = _source_of(split, self.sources[split])
        rows: list[tuple[str, Row, Any]] = []
        for prompt in self.prompts[split]:
            if datasets and prompt.dataset not in datasets:
                continue
            number = prompt.prompt_id.rpartition("/")[2]
            rows.append((f"row {number} of {source.describe()}", self._rows[prompt.prompt_id], prompt.columns))
        with naming(f"data.{split}"):
            return self._examples(f"data.{split}", source, rows, self.renderer, column, turns)

    def examples_of(self, data: SourceSpec, prompt_column: str, column: str, turns: Turns = "all") -> list[Example]:
        """See :class:`lit_grpo.data.examples.AnsweredData`."""
        source = HubRows(**data) if isinstance(data, dict) else make_source(data)
        renderer = replace(self.renderer, prompt_column=prompt_column) if prompt_column else self.renderer
        rows = ((place, row, row) for place, row in _checked(source))
        self._read_for_plugins.append(self._examples("rollout.plugins", source, rows, renderer, column, turns))
        return self._read_for_plugins[-1]

    def _examples(
        self,
        place: str,
        source: RowSource,
        rows: Iterable[tuple[str, Row, Row]],
        renderer: PromptRenderer,
        column: str,
        turns: Turns,
    ) -> list[Example]:
        examples: list[Example] = []
        reasons: dict[int, str] = {}
        longest = longest_sequence(self.policy)
        for row_place, row, columns in rows:
            try:
                answer = column_of(columns, column) if column else None
                example = render_example(renderer, self._tokenizer, row, answer, turns, row_place)
                if longest is not None and example.num_tokens > longest:
                    raise UnusableRow(
                        f"has {example.num_tokens} tokens with its answer, and the policy's context is {longest}"
                    )
            except UnusableRow as reason:
                reasons[int(row_place.split()[1])] = str(reason)
            except EndlessTemplate as error:
                raise ValueError(f"{row_place} {error}; mend the template, or the row.") from None
            else:
                examples.append(example)
        self._report(place, source, len(examples), reasons)
        return examples

    def _report(self, place: str, source: RowSource, num_usable: int, reasons: dict[int, str]) -> None:
        if num_usable + len(reasons) == 0:
            raise ValueError(f"{source.describe()} has no rows; give a source that has at least one.")
        if not reasons:
            return
        alike: dict[str, list[int]] = {}
        for number, reason in reasons.items():
            alike.setdefault(reason, []).append(number)
        shown = [_rows(numbers, reason) for reason, numbers in list(alike.items())[:NUM_ROWS_SHOWN]]
        if rest := sum(map(len, list(alike.values())[NUM_ROWS_SHOWN:])):
            shown.append(f"and {rest} more")
        report = (
            f"{len(reasons)} of the {num_usable + len(reasons)} rows of {source.describe()} "
            f"{'is' if len(reasons) == 1 else 'are'} unusable (rows count from 0): {'; '.join(shown)}"
        )
        if not num_usable:
            raise ValueError(f"{report}; no row is left: check data.prompt_column, data.template and the data.")
        if self.unusable_rows == "refuse":
            raise ValueError(f"{report}; mend them, or set data.unusable_rows to drop to go on without them.")
        rank_zero_only(warn)(f"{place}: {report}; they are left out.")


def _checked(source: RowSource) -> Iterator[tuple[str, Row]]:
    """Yield copies of a source's rows, each with its place."""
    for number, row in enumerate(_told(source)):
        place = f"row {number} of {source.describe()}"
        check_size(row, place)
        if not isinstance(row, dict):
            raise ValueError(f"{place} is of type {type(row).__name__}, not a dict; give one dict a row.")
        yield place, {name: own_copy(value, f"column {name!r} of {place}") for name, value in row.items()}


def _told(source: RowSource) -> Iterator[Any]:
    tell = rank_zero_only(say)
    if isinstance(source, FileRows) and (size := source.path.stat().st_size) > LARGE_FILE:
        tell(f"data    reading {source.describe()}, {size / 2**20:,.0f} MiB", flush=True)
    began = last = time.monotonic()
    for number, row in enumerate(source.rows()):
        if number and (now := time.monotonic()) - last >= TELL_EVERY_S:
            last = now
            tell(
                f"data    {counted(number, 'row')} of {source.describe()} so far, after {now - began:.0f} s", flush=True
            )
        yield row


def _rows(numbers: list[int], reason: str) -> str:
    first, *others = numbers
    if not others:
        return f"row {first} {reason}"
    shown = ", ".join(map(str, others[: NUM_ROWS_SHOWN - 1]))
    more = f" and {len(numbers) - NUM_ROWS_SHOWN} more" if len(numbers) > NUM_ROWS_SHOWN else ""
    return f"row {first} {reason}, and likewise row{'s'[: len(others) > 1]} {shown}{more}"


def _source_of(split: str, source: Any) -> RowSource:
    with naming(f"data.{split}"):
        return make_source(source)


def _rename(row: Row, columns: dict[str, str], place: str) -> Row:
    for name, column in columns.items():
        if column not in row:
            raise ValueError(
                f"data.columns takes {name!r} from column {column!r}, which {place} lacks; it has {listed(row)}."
            )
    kept = {column: value for column, value in row.items() if column not in columns.values()}
    return kept | {name: row[column] for name, column in columns.items()}


def loaded_prompts(trainer: Trainer) -> dict[str, list[Prompt]]:
    """The prompts that the data module has loaded, by split; none of a dataloader of the user's own."""
    return getattr(trainer.datamodule, "prompts", {})  # pyrefly: ignore[missing-attribute]


def asked_prompts(trainer: Trainer) -> dict[str, list[Prompt]]:
    """Those, and among the training prompts the largest that a plug-in may make of them."""
    prompts = loaded_prompts(trainer)
    rewritten = getattr(trainer.datamodule, "rewritten", [])  # pyrefly: ignore[missing-attribute]
    return {split: [*rows, *rewritten] if split == "train" else rows for split, rows in prompts.items()}


def own_loader(trainer: Trainer) -> PromptLoader | None:
    loader = trainer.train_dataloader
    return loader if isinstance(loader, PromptLoader) else None
