"""Rollouts without a model, for ``host_cost``: CPU microseconds of a decode step, in all and by part of the code.

The slots decode by tables and recordings, as on a GPU, and a recording does nothing when it is replayed. Logits are the
same for all rows, of a vocabulary of 16 tokens, drawn from in blocks as a large one is. Copies to the device are packed
as for a GPU and stay on the host. All else is what a run does: the loop, the ledger, the plan, lengths that are
predicted and looked at, tables, sampled tokens, completions and their texts.

Run here and in the checkout of an earlier commit. Answers a case, a line of JSON, with its figures, until there is no
more.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from benchmarks.random_policies import Sizes, random_qwen3
from lit_grpo.faults import Phases
from lit_grpo.plugins import CoreListener
from lit_grpo.policy.spec import PolicySpec
from lit_grpo.rollout import sampling
from lit_grpo.rollout.buffer import RolloutBuffer, group_requests
from lit_grpo.rollout.loop import RolloutLoop, RolloutStats
from lit_grpo.rollout.slots import generator as slots
from lit_grpo.rollout.slots import rows as slot_rows
from lit_grpo.rollout.slots.copies import WeightCopies
from lit_grpo.rollout.slots.forward import DecodingMode
from lit_grpo.rollout.slots.graphs import GraphedDecoder
from lit_grpo.rollout.slots.kept import KeptCompletions
from lit_grpo.rollout.slots.kv import cache as slot_cache
from lit_grpo.rollout.slots.kv.shelves import Shelf
from lit_grpo.rollout.slots.kv.tables import RowTables
from lit_grpo.scheduling.ledger import RequestLedger
from lit_grpo.scheduling.lengths import LengthPredictor
from lit_grpo.scheduling.plans.plan import Queue
from lit_grpo.types import Completion, Prompt, RolloutGroup, SamplingParams, StepEvents
from scripts.make_tiny import EOS_ID, make_tokenizer

SIZES = Sizes(28, 16, 16, 2, 1, 8, tied=True)
"""As many layers as Qwen3-1.7B has, whose places the tables hold; all else as small as can be."""
PROMPT_TOKENS, GROUP_SIZE, MAX_TOKENS = 24, 32, 1024
MEAN_TOKENS = 256
"""Of completions that end: each token ends one with the same chance."""
SCARCE = 0.375
"""KV tokens that there is memory for where it is scarce, of what all rows take at their limit."""
FIRST = 200
"""Steps before those that are measured: by then completions have passed the points at which lengths are predicted."""
KNOWN = 300
"""Steps of a rollout before it, from which lengths are known."""
_CALIBRATED = 5000
PARTS = {
    "ledger": [RequestLedger],
    "plan": [Queue],
    "predictions": [LengthPredictor],
    "buffer": [RolloutBuffer],
    "rows": [slot_rows.TokenRows],
    "tables": [slot_cache.SlotCache, slot_cache.KVBudget, RowTables, KeptCompletions, Shelf],
    "launches": [GraphedDecoder],
    "weights": [DecodingMode, WeightCopies],
    "slots": [slots.SlotGenerator],
}
"""Classes by the part that their methods count in; what calls none of them counts in the loop."""


@dataclass(frozen=True)
class HostCase:
    """Case of a rollout.

    Args:
        rows: Completions that decode at a time.
        ends: Whether completions end, and others take their places.
        is_scarce: Whether memory is too small for all rows at their limit.
        num_steps: Number of steps that are measured in all, and again by part.
    """

    rows: int
    ends: bool
    is_scarce: bool
    num_steps: int


class Watching(CoreListener):
    """Listens as a run's progress bar and its rewards do."""

    def __init__(self) -> None:
        self.tokens = self.done = self.groups = 0

    def on_step(self, events: StepEvents) -> None:
        """Count tokens."""
        self.tokens += events.num_tokens

    def on_completion(self, completion: Completion) -> None:
        """Count completions."""
        self.done += 1

    def on_group(self, group: RolloutGroup) -> None:
        """Count groups."""
        self.groups += 1


class _Beside(str):
    """The host's memory as if it were a device's."""

    type = "beside"


class _Timer:
    """CPU time by part; what a part calls of another counts there alone, and what timing takes nowhere."""

    def __init__(self) -> None:
        self._ns: Counter[str] = Counter()
        self._called: Counter[str] = Counter()  # of a part
        self._calls: Counter[str] = Counter()  # by a part
        self.begin()
        nothing = self.timed(lambda: None, "called")
        for _ in range(_CALIBRATED):
            nothing()
        self._enter("loop")
        self._of_called, self._of_caller = (self._ns[part] / _CALIBRATED for part in ("called", "loop"))
        for counter in (self._ns, self._called, self._calls):
            counter.clear()

    def begin(self) -> None:
        """Count in the loop from now on."""
        self._part, self._since = "loop", time.thread_time_ns()

    def us(self) -> dict[str, float]:
        """Return the microseconds of each part."""
        spent = {part: self._called[part] * self._of_called + self._calls[part] * self._of_caller for part in self._ns}
        return {part: (ns - spent[part]) / 1e3 for part, ns in self._ns.items()}

    def _enter(self, part: str) -> str:
        now = time.thread_time_ns()
        self._ns[self._part] += now - self._since
        before, self._part, self._since = self._part, part, now
        return before

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return a function whose time counts in a part."""

        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            before = self._enter(part)
            self._called[part] += 1
            self._calls[before] += 1
            try:
                return function(*arguments, **named)
            finally:
                self._enter(before)

        return timed

    @contextmanager
    def attached(self, generator: Any) -> Iterator[None]:
        """Time the methods of all parts."""
        places: list[tuple[Any, str, str]] = [
            (RolloutStats, "add_step", "events"),
            (Phases, "on_step", "events"),
            *((Watching, name, "events") for name in ("on_step", "on_completion", "on_group")),
            *(
                (each, "in_one_copy", "copies")
                for each in (slots, slot_rows, slot_cache)
                if "in_one_copy" in vars(each)
            ),
            (slots, "sample_tokens", "sampling"),
            (generator, "_head", "sampling"),
            (generator, "_text_of", "texts"),
        ]
        for part, kinds in PARTS.items():
            for kind in kinds:
                own = [name for name, value in vars(kind).items() if type(value).__name__ == "function"]
                places += [(kind, name, part) for name in own if name == "__call__" or not name.startswith("__")]
        with ExitStack() as attached:
            for owner, name, part in places:
                attached.enter_context(mock.patch.object(owner, name, self.timed(getattr(owner, name), part)))
            self.begin()
            yield
            self._enter("loop")


def decoder(case: HostCase, policy: Any) -> Any:
    """Return slots that compute nothing."""
    kv_memory = "8GiB"
    if case.is_scarce:
        token = 2 * SIZES.layers * SIZES.kv_heads * SIZES.head_dim * 4
        kv_memory = f"{SCARCE * case.rows * MAX_TOKENS * token / 2**20:.3f}MiB"
    generator: Any = slots.SlotGenerator(case.rows, kv_memory=kv_memory)
    recorded = functools.partial(GraphedDecoder, make_recorder=lambda: lambda step: lambda: None)
    with (
        mock.patch.object(slots, "row_attention", lambda shape: lambda *attended: None),
        mock.patch.object(slots, "GraphedDecoder", recorded),
    ):
        generator.start(PolicySpec(policy, make_tokenizer()))
    generator.load_weights(policy.named_parameters(), 0)
    generator.runs_ahead = True  # as on a GPU
    logits_1V = torch.full((1, SIZES.vocab_size), math.log((1 - 1 / MEAN_TOKENS) / (SIZES.vocab_size - 1)))
    logits_1V[:, EOS_ID] = -math.log(MEAN_TOKENS) if case.ends else -math.inf
    generator._head = lambda hidden_BD: logits_1V.expand(len(hidden_BD), -1)
    return generator


def measure(case: HostCase, policy: Any) -> dict[str, float]:
    """Return CPU microseconds a step, ``all`` of them and by part, and a completion's until it is queued."""
    generator = decoder(case, policy)
    lengths = LengthPredictor((0, 8, 32, 64), num_scalars=2)
    params, visits = SamplingParams(max_tokens=MAX_TOKENS), itertools.count()

    def roll_out(until: Callable[[RolloutBuffer, int], bool], num_completions: int) -> None:
        visit, group_size = next(visits), min(GROUP_SIZE, case.rows)
        prompt_ids = tuple(3 + number % 10 for number in range(PROMPT_TOKENS))
        names = [f"prompt {number}" for number in range(num_completions // group_size)]
        prompts = [Prompt(name, prompt_ids, "", visit=visit) for name in names]
        buffer = RolloutBuffer()
        loop = RolloutLoop(generator, buffer, "short_last", lengths, [Phases(), Watching()])
        buffer.open(group_requests(prompts, group_size, params, seed=0))
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # bf16-mixed, as Lightning has it
            loop.run(lambda step: until(buffer, step))

    if case.ends:  # so that lengths are known
        roll_out(lambda buffer, step: buffer.ready(step) or step == KNOWN, case.rows)
        lengths.end(commit=True)
    timer, marks, measuring = _Timer(), dict[int, float](), ExitStack()
    began = time.thread_time()
    num_completions = case.rows * (3 + 2 * case.num_steps // MEAN_TOKENS if case.ends else 1)

    def until(buffer: RolloutBuffer, step: int) -> bool:
        marks[step] = time.thread_time()
        if step == FIRST + case.num_steps:
            measuring.enter_context(timer.attached(generator))
        elif step == FIRST + 2 * case.num_steps:
            measuring.close()
        return buffer.ready(step) or step == FIRST + 2 * case.num_steps

    roll_out(until, num_completions)
    own = {part: us / case.num_steps for part, us in timer.us().items()}
    whole = 1e6 * (marks[FIRST + case.num_steps] - marks[FIRST]) / case.num_steps
    return {"all": whole, "queued": 1e6 * (marks[0] - began) / num_completions, **own}


def main() -> None:
    """Answer cases."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    packed = slots.in_one_copy
    host: Any = _Beside("cpu")
    modules: list[Any] = [slots, slot_rows, slot_cache]
    for module in modules:
        module.in_one_copy = lambda arrays, device: packed(arrays, host)
    drawing: Any = sampling
    drawing._BLOCK = 4  # so that 16 tokens are drawn in blocks
    policy = random_qwen3(SIZES)
    for line in sys.stdin:
        print(json.dumps(measure(HostCase(**json.loads(line)), policy)), flush=True)


if __name__ == "__main__":
    main()
