"""Prompts become batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from datetime import date as Date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from lit_grpo.budgets.history import PromptHistory
from lit_grpo.budgets.prompts import MOST_SKIPPED, PromptChooser
from lit_grpo.budgets.spreading import spread
from lit_grpo.data.examples import Example
from lit_grpo.data.mixture import MixtureOrder, MixtureWeights
from lit_grpo.plugins import ask
from lit_grpo.types import Prompt, PromptBatch


class PromptLoader:
    """Training prompts as one endless stream, cut into batches; a checkpoint keeps the place in it.

    Index ``s`` of the stream is place ``s % N`` of epoch ``s // N``, whose order depends on the seed and
    the epoch alone; the epoch is the prompt's ``visit``. A step of all W ranks takes the next P x W
    indices, so no prompt is skipped and a batch may cross epochs; of these each rank gets P, by how long completions
    of earlier visits were (:func:`spread`), and rank r the r-th P before there were any. With a ``chooser`` it takes
    the next P x W that are asked; what is passed over is counted, and comes again in the next epoch. Nothing is read
    ahead. A batch counts as consumed once it is marked ``trained`` or the next one is asked for, so
    that a step which was cut off is done again after resuming.

    With ``on_demand`` its batches are empty, and what fills them takes prompts by :meth:`draw`, which count as
    consumed at once: a checkpoint has to keep them.

    With ``mixture`` index ``s`` is a prompt of the data set that is due there, and the prompt's ``visit`` the epoch of
    that data set (:class:`lit_grpo.data.mixture.MixtureOrder`).

    Args:
        prompts: The N prompts, at least one.
        batch_size: P, the prompts of one batch on one rank.
        rank: The rank for which batches are drawn.
        world_size: W, the number of ranks.
        seed: Seed of the shuffling.
        shuffle: Whether each epoch is shuffled; if not, it has the order of ``prompts``.
        chooser: Says which prompts are asked; by default all.
        rewrite: Returns a prompt as it is asked; by default they are asked as their rows say.
        mixture: Weights of the data sets of the prompts; by default all prompts are drawn equally often.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        chooser: PromptChooser | None = None,
        rewrite: Callable[[Prompt], Prompt] | None = None,
        mixture: MixtureWeights | None = None,
    ) -> None:
        self.chooser, self.rewrite, self._history = chooser, rewrite, PromptHistory()
        self._mixture = mixture
        datasets = [prompt.dataset for prompt in prompts]
        self._mixed = None if mixture is None else MixtureOrder(datasets, mixture, seed, shuffle)
        self.prompts = prompts
        self._digest = _digest_of(prompts)  # before anybody can have changed a row
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.on_demand = False
        self._start = self._taken = 0  # what the batch takes of the stream
        self._num_skipped = 0
        self._batch: PromptBatch | None = None
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def plug_in(
        self, chooser: PromptChooser | None, rewrite: Callable[[Prompt], Prompt] | None, on_demand: bool
    ) -> None:
        self.chooser, self.rewrite, self.on_demand = chooser, rewrite, on_demand

    @property
    def prompts_per_step(self) -> int:
        """P x W, what one step of all ranks asks."""
        return self.batch_size * self.world_size

    def use_history(self, history: PromptHistory) -> None:
        self._history = history
        if self.chooser is not None:
            self.chooser.use_history(history)

    def __len__(self) -> int:
        """The number of batches of one Lightning epoch; the place in the stream carries over to the next."""
        return max(1, len(self.prompts) // self.prompts_per_step)

    def __iter__(self) -> Iterator[PromptBatch]:
        for _ in range(len(self)):
            if self.on_demand:
                yield PromptBatch([])
                continue
            if self._batch is not None:
                self._start += self._taken
            prompts, self._taken = self._next(self.batch_size)
            self._batch = PromptBatch(prompts)
            yield self._batch

    def draw(self, num_prompts: int) -> list[Prompt]:
        """Take the next prompts; all ranks take equally many at the same time."""
        prompts, taken = self._next(num_prompts)
        self._start += taken
        return prompts

    def further(self, most: int) -> Iterator[Prompt]:
        """Yield prompts that are asked after the batch's, at most so many, and count those that are taken to it.

        Of W ranks this one gets every W-th; once all have what they want, :meth:`agree` has to be told.
        """
        place = self._start + self._taken
        for _ in range(most):
            prompts, place = self._ask(place, self.world_size)
            self._taken = place - self._start
            yield self._rewritten(prompts[self.rank])

    def give_back(self) -> None:
        """Let the next batch take what this one has taken."""
        self._taken = 0

    def sync_draws_across_ranks(self, largest: Callable[[float], float]) -> None:
        """Count to the batch what any rank has taken of the stream; ``largest`` is over ranks."""
        self._taken = int(largest(float(self._taken)))

    def take_skipped(self) -> int:
        """Return how many prompts have been passed over since this was asked last, for all ranks together."""
        skipped, self._num_skipped = self._num_skipped, 0
        return skipped

    def state_dict(self) -> dict[str, Any]:
        trained = self._batch is not None and self._batch.trained
        rule = {} if self.chooser is None else self.chooser.state_dict()
        return {"prompts_consumed": self._start + trained * self._taken, "ask": rule, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint left off; batch size and number of ranks may have changed.

        Raises:
            ValueError: The seed, ``shuffle`` or the prompts differ, so that the stream would too.
        """
        differing = [
            f"{name} was {before} and is now {value}"
            for name, value in self._identity().items()
            if (before := state_dict.get(name, "none")) != value
        ]
        if len(differing) > 1 and differing[-1].startswith("digest"):
            differing.pop()  # it follows from the others, or adds nothing to them
        if differing:
            raise ValueError(
                f"Resuming would not continue the same stream of prompts: {', '.join(differing)}; "
                "restore the data settings of the checkpoint, or start a new run."
            )
        self._start = state_dict["prompts_consumed"]
        self._batch = None
        rule = state_dict.get("ask", {})
        if self.chooser is not None and rule.keys() == self.chooser.state.keys():  # else another rule begins again
            self.chooser.load_state_dict(rule)

    def _identity(self) -> dict[str, Any]:
        size = len(self.prompts)
        mixed = "none" if self._mixture is None else str(self._mixture)
        of_order = {"seed": self.seed, "shuffle": self.shuffle, "num_prompts": size, "mixture": mixed}
        return of_order | {"digest_of_prompts": self._digest}

    def _next(self, num_prompts: int) -> tuple[list[Prompt], int]:
        """This rank's share of the next prompts, and how many places of the stream they take."""
        asked, place = self._ask(self._start, num_prompts * self.world_size)
        return [*map(self._rewritten, self._own(asked))], place - self._start

    def _own(self, asked: list[Prompt]) -> list[Prompt]:
        if self.world_size == 1:
            return asked
        expected = self._history.expected([prompt.prompt_id for prompt in asked])
        places = spread([record.mean_tokens for record in expected], self.world_size)
        return [asked[place] for place in places[self.rank]]

    def _rewritten(self, prompt: Prompt) -> Prompt:
        if self.rewrite is None:
            return prompt
        asked = self.rewrite(prompt)
        return replace(asked, altered=asked.digest != prompt.digest)

    def _ask(self, place: int, number: int) -> tuple[list[Prompt], int]:
        """The next prompts from a place of the stream on that are asked, all ranks' together, and the place after."""
        if self.chooser is not None and (candidates := ask(self.chooser.rule, "numbers").prompt_candidates) > 1:
            num_due = max(number, min(number * candidates, len(self.prompts)))
            due = [self._draw(index) for index in range(place, place + num_due)]
            self._num_skipped += num_due - number
            return self.chooser.largest(due, number), place + num_due
        asked: list[Prompt] = []
        while len(asked) < number:
            prompt, place = self._ask_one(place)
            asked.append(prompt)
        return asked, place

    def _ask_one(self, place: int) -> tuple[Prompt, int]:
        """The first prompt from a place of the stream on that is asked, and the place after it."""
        for index in range(place, place + MOST_SKIPPED):
            prompt = self._draw(index)
            if self.chooser is None or self.chooser.asks(prompt):
                self._num_skipped += index - place
                return prompt, index + 1
        raise ValueError(
            f"rollout.plugins asks none of {MOST_SKIPPED} prompts in a row: raise the chances that its rule gives, "
            "or give more prompts."
        )

    def _draw(self, index: int) -> Prompt:
        if self._mixed is not None:
            place, epoch = self._mixed.place(index)
            return replace(self.prompts[place].own(), visit=epoch)
        epoch, place = divmod(index, len(self.prompts))
        if self.shuffle:
            if self._order[0] != epoch:
                order = np.random.default_rng((self.seed, epoch)).permutation(len(self.prompts))
                self._order = (epoch, order)
            place = int(self._order[1][place])
        return replace(self.prompts[place].own(), visit=epoch)


def _digest_of(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{prompt.prompt_id}{prompt.token_ids}{_columns_of(prompt)}\n".encode())
    return digest.hexdigest()[:12]


def row_digests(rows: Iterable[Prompt | Example]) -> list[str]:
    """Return a digest of each row, its number apart: what the policy reads, and all columns or what it imitates."""
    texts = (
        f"{row.token_ids}{_columns_of(row)}"
        if isinstance(row, Prompt)
        else f"{row.prompt_ids}{row.answer_ids_T.tolist()}{row.learned_T.tolist()}"
        for row in rows
    )
    return [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]


def _columns_of(prompt: Prompt) -> str:
    """Return a prompt's columns as text, with the digest of its pixels if it has images.

    A value that JSON does not know counts by its content, or else by its type.
    """
    pixels = "" if prompt.pictures is None else prompt.pictures.digest.hex()
    try:
        return pixels + json.dumps(prompt.columns, sort_keys=True, default=_text_of)
    except (TypeError, ValueError):  # keys that are no text or cannot be sorted, or a column that contains itself
        return pixels + json.dumps({str(name): type(value).__name__ for name, value in prompt.columns.items()})


def _text_of(value: Any) -> Any:
    if isinstance(value, Date | Decimal | Path | complex | bytes):
        return str(value)
    if isinstance(value, AbstractSet):
        return sorted(map(repr, value))
    if hasattr(value, "tolist"):  # arrays, tensors and numbers of NumPy
        return value.tolist()
    return hashlib.sha256(value.tobytes()).hexdigest() if hasattr(value, "tobytes") else type(value).__name__


class EvalLoader:
    """Each prompt exactly once, in order; rank r of W takes the rows r, r + W, r + 2 W and so on.

    All ranks have the same number of batches: where rows run out, the last batch is empty.

    Args:
        prompts: All prompts, at least one.
        batch_size: The most prompts of a batch.
        rank: The rank for which batches are drawn.
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
            yield PromptBatch([prompt.own() for prompt in self.prompts[start : start + self.batch_size]])
