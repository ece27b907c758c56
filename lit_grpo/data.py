"""Rows of any source become prompts, and prompts become batches."""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from lightning import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn

from lit_grpo.policy import TINY, load_tokenizer
from lit_grpo.sources import Row, RowSource, make_source
from lit_grpo.types import Prompt, PromptBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS_OF_STAGE = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("predict",),
}
RESERVED_CHAT_KWARGS = {
    "conversation",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "padding",
    "truncation",
    "max_length",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
}
NUM_ROWS_SHOWN = 10


class PromptLoader:
    """Training prompts as one endless stream, cut into batches; a checkpoint keeps the place in it.

    Index ``s`` of the stream is place ``s % N`` of epoch ``s // N``, whose order depends on the seed and
    the epoch alone; the epoch is the prompt's ``visit``. A step of all W ranks takes the next P x W
    indices, rank r the r-th P of them, so no prompt is skipped and a batch may cross epochs. Nothing is
    read ahead. A batch counts as consumed once it is marked ``trained`` or the next one is asked for, so
    that a step which was cut off is done again after resuming.

    Args:
        prompts: The N prompts, at least one.
        batch_size: P, the prompts of one batch on one rank.
        rank: Which rank's batches these are.
        world_size: W, the number of ranks.
        seed: Of the order.
        shuffle: Whether an epoch has an order of its own, or that of ``prompts``.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.prompts = prompts
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self._start = 0
        self._batch: PromptBatch | None = None
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    @property
    def prompts_per_step(self) -> int:
        """P x W, what one step of all ranks takes from the stream."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        """Batches of one Lightning epoch; the place in the stream carries over to the next epoch."""
        return max(1, len(self.prompts) // self.prompts_per_step)

    def __iter__(self) -> Iterator[PromptBatch]:
        """Yield the next ``len(self)`` batches."""
        for _ in range(len(self)):
            if self._batch is not None:
                self._start += self.prompts_per_step
            first = self._start + self.rank * self.batch_size
            self._batch = PromptBatch([self._draw(first + place) for place in range(self.batch_size)])
            yield self._batch

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, and what its order depends on."""
        trained = self._batch is not None and self._batch.trained
        return {"prompts_consumed": self._start + trained * self.prompts_per_step, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint left off; batch size and number of ranks may have changed.

        Raises:
            ValueError: The seed, ``shuffle`` or the number of prompts differs, so that the order would too.
        """
        differing = [
            f"{name} was {state_dict[name]} and is now {value}"
            for name, value in self._identity().items()
            if state_dict[name] != value
        ]
        if differing:
            raise ValueError(
                f"Resuming would not continue the same stream of prompts: {', '.join(differing)}; "
                "restore the data settings of the checkpoint, or start a new run."
            )
        self._start = state_dict["prompts_consumed"]
        self._batch = None

    def _identity(self) -> dict[str, Any]:
        return {"seed": self.seed, "shuffle": self.shuffle, "num_prompts": len(self.prompts)}

    def _draw(self, index: int) -> Prompt:
        epoch, place = divmod(index, len(self.prompts))
        if self.shuffle:
            if self._order[0] != epoch:
                order = np.random.default_rng((self.seed, epoch)).permutation(len(self.prompts))
                self._order = (epoch, order)
            place = int(self._order[1][place])
        return replace(self.prompts[place], visit=epoch)


class EvalLoader:
    """Each prompt exactly once, in order; rank r of W takes the rows r, r + W, r + 2 W and so on.

    All ranks have the same number of batches: where rows run out, the last batch is empty.

    Args:
        prompts: All prompts, at least one.
        batch_size: The most prompts of a batch.
        rank: Which rank's batches these are.
        world_size: W, the number of ranks.
    """

    def __init__(self, prompts: list[Prompt], batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.prompts = prompts[rank::world_size]
        self.batch_size = batch_size
        self.num_batches = -(-len(prompts) // (batch_size * world_size))

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[PromptBatch]:
        """Yield new batches, for the rollouts of an earlier pass live in the old ones."""
        for start in range(0, self.num_batches * self.batch_size, self.batch_size):
            yield PromptBatch(self.prompts[start : start + self.batch_size])


class UnusableRow(Exception):
    """A row that can be no prompt; the message is the reason and follows the words "row 7"."""


@dataclass(frozen=True)
class PromptRenderer:
    """Turns a row into the token ids and the text of its prompt; the fields are those of PromptDataModule."""

    prompt_column: str = "prompt"
    template: str | None = None
    system_prompt: str | None = None
    chat_template: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_prompt_tokens: int = 512

    def __post_init__(self) -> None:
        if self.max_prompt_tokens < 1:
            raise ValueError(f"data.max_prompt_tokens must be at least 1, not {self.max_prompt_tokens}.")
        if self.template is not None:
            _parse_template(self.template)
        if self.chat_template is False and (self.system_prompt is not None or self.chat_template_kwargs):
            raise ValueError(
                "data.system_prompt and data.chat_template_kwargs act through the chat template, but "
                "data.chat_template is false; leave them out, or set it to true."
            )
        if taken := RESERVED_CHAT_KWARGS.intersection(self.chat_template_kwargs or {}):
            raise ValueError(
                f"data.chat_template_kwargs may not set {', '.join(sorted(taken))}, which decides how token "
                "ids are made here; leave only variables of the chat template."
            )

    def render(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], str]:
        """Return token ids and text.

        Raises:
            UnusableRow: The row has no prompt, or none that is usable.
            ValueError: A chat template is needed and the tokenizer has none.
        """
        prompt = self._read(row)
        if self._renders_as_chat(prompt):
            token_ids = self._encode_chat(prompt, tokenizer)
            text = str(tokenizer.decode(token_ids))
        else:
            token_ids = _encode_text(prompt, tokenizer)
            text = prompt
        if not token_ids:
            raise UnusableRow("has a prompt that the tokenizer turns into no tokens")
        if len(token_ids) > self.max_prompt_tokens:
            limit = f"max_prompt_tokens={self.max_prompt_tokens}"
            raise UnusableRow(f"has a prompt of {len(token_ids)} tokens, more than {limit}")
        return tuple(token_ids), text

    def _renders_as_chat(self, prompt: str | list[Row]) -> bool:
        messages = isinstance(prompt, list)
        if messages and self.chat_template is False:
            raise UnusableRow("holds chat messages, which chat_template: false cannot render")
        if self.chat_template is None:
            return messages or self.system_prompt is not None
        return self.chat_template

    def _read(self, row: Row) -> Any:
        if self.template is None:
            prompt = _column(row, self.prompt_column)
        else:
            prompt = _fill_template(self.template, row)
        if isinstance(prompt, str):
            texts = [prompt]
        elif not isinstance(prompt, list):
            kind = type(prompt).__name__
            raise UnusableRow(f"has a prompt of type {kind}, neither text nor a list of chat messages")
        elif not all(map(_is_message, prompt)):
            raise UnusableRow('has a chat message that is not {"role": text, "content": text}')
        else:
            texts = [message["content"] for message in prompt]
        if not any(text.strip() for text in texts):
            raise UnusableRow("has an empty prompt")
        return prompt

    def _encode_chat(self, prompt: str | list[Row], tokenizer: PreTrainedTokenizerBase) -> list[int]:
        import jinja2

        if tokenizer.chat_template is None:
            raise ValueError(
                "The prompts ask for a chat template, and the tokenizer of data.policy has none; "
                "choose a chat model, or give plain text without data.system_prompt and data.chat_template."
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise UnusableRow("begins with a system message of its own beside system_prompt")
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        try:
            token_ids: Any = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False, **(self.chat_template_kwargs or {})
            )
        except jinja2.TemplateError as error:
            raise UnusableRow(f"is refused by the chat template: {error}") from error
        return list(token_ids)


def _parse_template(template: str) -> list[tuple[str, str | None]]:
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(
            f"data.template {template!r} is malformed: {error}; name columns as {{column}} and write a brace "
            "that is meant as one twice."
        ) from error
    for _, column, spec, conversion in parts:
        if column is not None and (spec or conversion or not column or any(sign in column for sign in ".[]")):
            raise ValueError(
                f"data.template {template!r} may hold only plain columns such as {{question}}; leave out "
                "attributes, indices, formats and empty braces."
            )
    if all(column is None for _, column, _, _ in parts):
        raise ValueError(f"data.template {template!r} names no column; write one as {{question}}.")
    return [(literal, column) for literal, column, _, _ in parts]


def _fill_template(template: str, row: Row) -> str:
    pieces = _parse_template(template)
    return "".join(text + ("" if column is None else str(_column(row, column))) for text, column in pieces)


def _column(row: Row, column: str) -> Any:
    if column not in row:
        raise UnusableRow(f"has no column {column!r} (it has {', '.join(map(repr, row)) or 'none'})")
    if row[column] is None:
        raise UnusableRow(f"has no value in column {column!r}")
    return row[column]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    token_ids: list[int] = list(tokenizer(text, add_special_tokens=True)["input_ids"])
    while token_ids and token_ids[-1] == tokenizer.eos_token_id:
        token_ids.pop()
    return token_ids


class PromptDataModule(LightningDataModule):
    """Prompts for training, validation, test and predict, from files, Hugging Face datasets or Python.

    A source is the path of a .jsonl, .json, .csv or .parquet file, a folder written by ``save_to_disk``,
    the id of a dataset on the Hugging Face hub, or a :class:`lit_grpo.sources.RowSource` by class path.

    Args:
        policy: Whose tokenizer renders the prompts: ``tiny``, a folder or a hub id.
        train: Source of the training prompts.
        validation: Source of the validation prompts; without it ``fit`` does not validate.
        test: Source of the test prompts.
        predict: Source of the prompts to complete with ``predict``.
        batch_size: Prompts of one training iteration, on each rank.
        eval_batch_size: Prompts of one batch in validation, test and predict, on each rank.
        prompt_column: The column that holds the prompt, as text or as a list of chat messages
            (``{"role": ..., "content": ...}``).
        template: Text that makes the prompt of several columns, for instance
            ``"Question: {question} Answer:"``; ``prompt_column`` is then unused.
        system_prompt: A system message to begin every conversation with.
        chat_template: Whether the tokenizer's chat template renders prompts. Without a value: where the
            prompt is a list of messages, or ``system_prompt`` is given.
        chat_template_kwargs: Variables for the chat template, for instance ``enable_thinking: false``.
        columns: New names for columns, as the reward functions know them: ``{answer: solution}`` hands
            them the column ``solution`` as ``answer``. Prompts are made of the old names.
        max_prompt_tokens: The longest prompt that is taken; prompts are never cut.
        unusable_rows: Whether rows without a usable prompt (missing, empty, malformed or too long) are
            an error (``refuse``) or are left out with a warning (``drop``).
        shuffle: Whether each epoch goes through the training prompts in an order of its own.
        seed: Of that order.
    """

    def __init__(
        self,
        policy: str = TINY,
        train: str | RowSource | None = None,
        validation: str | RowSource | None = None,
        test: str | RowSource | None = None,
        predict: str | RowSource | None = None,
        batch_size: int = 8,
        eval_batch_size: int = 64,
        prompt_column: str = "prompt",
        template: str | None = None,
        system_prompt: str | None = None,
        chat_template: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        columns: dict[str, str] | None = None,
        max_prompt_tokens: int = 512,
        unusable_rows: Literal["refuse", "drop"] = "refuse",
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ValueError(f"data.{name} must be at least {least}, not {value}.")
        if unusable_rows not in ("refuse", "drop"):
            raise ValueError(f"data.unusable_rows must be refuse or drop, not {unusable_rows!r}.")
        self.policy = policy
        self.sources = {"train": train, "validation": validation, "test": test, "predict": predict}
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.columns = columns or {}
        self.unusable_rows = unusable_rows
        self.shuffle = shuffle
        self.seed = seed
        self.renderer = PromptRenderer(
            prompt_column, template, system_prompt, chat_template, chat_template_kwargs, max_prompt_tokens
        )
        self.prompts: dict[str, list[Prompt]] = {}
        self._train_loader: PromptLoader | None = None

    def setup(self, stage: str) -> None:
        """Read and render the prompts that ``stage`` needs, once.

        Raises:
            ValueError: A source is not set, or has rows that are unusable.
        """
        splits = SPLITS_OF_STAGE[stage]
        if self.sources[splits[0]] is None:
            raise ValueError(
                f"data.{splits[0]} is not set, and {stage} needs it; give it a file, a folder, a dataset id "
                "or the class path of a RowSource."
            )
        named = {split: self.sources[split] for split in splits if split not in self.prompts}
        sources = {split: make_source(source) for split, source in named.items() if source is not None}
        for split, source in sources.items():
            self.prompts[split] = self._load(split, source)
        going_on = self.trainer is not None and self.trainer.global_step > 0
        if stage == "fit" and not (going_on and self._train_loader):
            self._train_loader = self._new_train_loader()

    def train_dataloader(self) -> PromptLoader:
        """The one loader of this fit, wherever it stands in its stream."""
        assert self._train_loader is not None, "setup('fit') comes before train_dataloader()"
        return self._train_loader

    def val_dataloader(self) -> EvalLoader | list[Any]:
        """The validation prompts, or no loader where there are none."""
        return self._eval_loader("validation") if "validation" in self.prompts else []

    def test_dataloader(self) -> EvalLoader:
        """The test prompts."""
        return self._eval_loader("test")

    def predict_dataloader(self) -> EvalLoader:
        """The prompts to complete."""
        return self._eval_loader("predict")

    def state_dict(self) -> dict[str, Any]:
        """The place in the training stream.

        Lightning keeps the state of the loader too, but gives it back only where an epoch was cut off:
        from a checkpoint at the end of an epoch the stream would begin anew.
        """
        return {} if self._train_loader is None else self._train_loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint left off; of no effect outside ``fit``."""
        fitting = self.trainer is None or self.trainer.state.fn == "fit"
        if self._train_loader is not None and fitting:
            self._train_loader.load_state_dict(state_dict)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.policy)

    def _new_train_loader(self) -> PromptLoader:
        rank, world_size = self._rank_and_world_size()
        return PromptLoader(self.prompts["train"], self.batch_size, rank, world_size, self.seed, self.shuffle)

    def _eval_loader(self, split: str) -> EvalLoader:
        return EvalLoader(self.prompts[split], self.eval_batch_size, *self._rank_and_world_size())

    def _rank_and_world_size(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _load(self, split: str, source: RowSource) -> list[Prompt]:
        prompts: list[Prompt] = []
        reasons: dict[int, str] = {}
        for number, row in enumerate(source.rows()):
            place = f"row {number} of {source.describe()}"
            if not isinstance(row, dict):
                raise ValueError(f"{place} is of type {type(row).__name__}, not a dict; give one dict a row.")
            columns = _rename(row, self.columns, place)
            try:
                token_ids, text = self.renderer.render(row, self._tokenizer)
            except UnusableRow as reason:
                reasons[number] = str(reason)
            else:
                prompts.append(Prompt(f"{split}/{number}", token_ids, text, columns))
        self._report(source, len(prompts), reasons)
        return prompts

    def _report(self, source: RowSource, num_usable: int, reasons: dict[int, str]) -> None:
        if num_usable + len(reasons) == 0:
            raise ValueError(f"{source.describe()} has no rows; give a source that has at least one.")
        if not reasons:
            return
        shown = [f"row {number} {reason}" for number, reason in list(reasons.items())[:NUM_ROWS_SHOWN]]
        if len(reasons) > NUM_ROWS_SHOWN:
            shown.append(f"and {len(reasons) - NUM_ROWS_SHOWN} more")
        report = (
            f"{len(reasons)} of the {num_usable + len(reasons)} rows of {source.describe()} are unusable "
            f"(rows count from 0): {'; '.join(shown)}"
        )
        if not num_usable:
            raise ValueError(
                f"{report}; no row is left: check data.prompt_column, data.template and the data."
            )
        if self.unusable_rows == "refuse":
            raise ValueError(f"{report}; mend them, or set data.unusable_rows to drop to go on without them.")
        rank_zero_warn(f"{report}; they are left out.")


def _rename(row: Row, columns: dict[str, str], place: str) -> Row:
    for name, column in columns.items():
        if column not in row:
            raise ValueError(
                f"data.columns takes {name!r} from column {column!r}, which {place} lacks; "
                f"it has {', '.join(map(repr, row)) or 'none'}."
            )
    kept = {column: value for column, value in row.items() if column not in columns.values()}
    return kept | {name: row[column] for name, column in columns.items()}
