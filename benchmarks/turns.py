"""Trajectories of many turns with tools that take their time: ours, ours in lock-step, and TRL's, on one environment.

All three have the same environment, in TRL's shape, and the same tokens, dictated by a decoder: a step gives each row
its next token, and takes the same time however many rows there are. So what differs is how waiting for tools and
decoding overlap. TRL decodes a turn of all trajectories, then makes their calls one after another. Lock-step is ours
with all answers held back until every trajectory has its own. The bound is the longest trajectory by itself: its tokens
and its calls, one after another.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.report import Claim, Options, Row, finish, need, note, parse_options
from lit_grpo.data.rendering import PromptRenderer
from lit_grpo.environments import Environments
from lit_grpo.plugins import Answer, fresh
from lit_grpo.rollout.generator import Capacity, StepEvents
from lit_grpo.rollout.loop import RolloutLoop
from lit_grpo.types import Key, Prompt, Request, SamplingParams

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TIMES_FASTER_THAN_TRL, TIMES_FASTER_THAN_LOCK_STEP, MOST_OVER_BOUND = 3.0, 2.0, 1.2


@dataclass(frozen=True)
class Work:
    """Trajectories: turns from 1 to ``most_turns``, each with a call of 0 to ``longest_s`` seconds, most of them short.

    Args:
        trajectories: How many.
        most_turns: The most turns with a call; one without follows.
        longest_s: Seconds of the longest call.
        step_s: Seconds of a decoding step.
        seed: Decides turns and seconds.
    """

    trajectories: int = 64
    most_turns: int = 7
    longest_s: float = 2.0
    step_s: float = 0.005
    seed: int = 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each trajectory: its prompt, and the seconds of its calls."""
        rng = random.Random(self.seed)
        return [
            {
                "prompt": [{"role": "user", "content": f"Trajectory {number}."}],
                "seconds": [self.longest_s * rng.random() ** 3 for _ in range(rng.randint(1, self.most_turns))],
            }
            for number in range(self.trajectories)
        ]

    def bound_s(self) -> float:
        """Seconds of the longest trajectory by itself."""
        return max(sum(row["seconds"]) + self.step_s * sum(len(turn) for turn in turns_of(row)) for row in self.rows)


class Waits:
    """An environment whose tool takes as long as its row says."""

    def reset(self, seconds: list[float], **_: Any) -> None:
        """Begin."""
        self._seconds = list(seconds)

    def wait(self, step: int) -> str:
        """Wait.

        Args:
            step: Which time.
        """
        time.sleep(self._seconds[step])
        return "done"


@cache
def chat_tokenizer() -> Any:
    """A byte tokenizer with the chat template of Qwen3 that TRL brings, which it can read calls of."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: index for index, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    trl = find_spec("trl")
    assert trl is not None and trl.origin is not None
    made.chat_template = (Path(trl.origin).parent / "chat_templates" / "qwen3.jinja").read_text()
    return made


def turns_of(row: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of a row's turns: a call each, and then a word."""
    calls = [f'<tool_call>\n{{"name": "wait", "arguments": {{"step": {step}}}}}\n</tool_call>' for step in _steps(row)]
    return [chat_tokenizer()(text)["input_ids"] + [chat_tokenizer().eos_token_id] for text in (*calls, "Done.")]


def _steps(row: dict[str, Any]) -> range:
    return range(len(row["seconds"]))


class Dictated:
    """Decodes what :func:`turns_of` says, a token of each row a step."""

    version = 0
    feature_points: tuple[int, ...] = ()
    keeps_ended = one_by_one = False
    num_likeliest = 0

    def __init__(self, work: Work) -> None:
        self._work, self._step = work, 0
        self._rows: dict[Key, Request] = {}
        self._due: dict[int, list[tuple[Request, list[int]]]] = {}  # by the step at which a turn ends
        self._turns = {f"train/{number}": turns_of(row) for number, row in enumerate(work.rows)}

    def capacity(self) -> Capacity:
        """A slot for each trajectory."""
        return Capacity(self._work.trajectories, self._work.trajectories - len(self._rows))

    def submit(self, requests: Sequence[Request], expected: Sequence[float] | None = None) -> None:
        """Begin the next turn of each."""
        for request in requests:
            token_ids = self._turns[request.prompt.prompt_id][len(request.prefix.turns)]
            self._rows[request.key] = request
            self._due.setdefault(self._step + len(token_ids), []).append((request, token_ids))

    def step(self) -> StepEvents:
        """Take as long as a step takes."""
        time.sleep(self._work.step_s)
        self._step += 1
        events = StepEvents(len(self._rows), len(self._rows))
        for request, token_ids in self._due.pop(self._step, ()):
            del self._rows[request.key]
            prefix = request.prefix.followed_by(token_ids, [-1.0] * len(token_ids), 0)
            events.finished.append(request.after(prefix).ended("stop"))
        return events

    def abort(self, keys: Iterable[Key]) -> list[Request]:
        """Nothing is ever stopped."""
        return []

    def expect(self, prompts: Iterable[Prompt]) -> None:
        """Nothing is computed."""

    def release(self, prompts: Iterable[Prompt]) -> None:
        """Nothing is kept."""


class LockStep(Environments):
    """Holds all answers back until every trajectory that goes on has its own."""

    def on_step(self, events: StepEvents) -> Answer | None:
        """Nothing while others decode."""
        return None

    def on_idle(self) -> Answer | None:
        """All together."""
        return self._answer() if len(self._events) == len(self._ledger.awaiting_env) else None


def ours(work: Work, lock_step: bool) -> Row:
    """Return the seconds of our rollout, those of the processor, and the share of time in which trajectories waited."""
    worker = fresh(Environments(factory=Waits, tool_timeout_s=60))
    if lock_step:
        worker.__class__ = LockStep
    worker.prepare(chat_tokenizer(), {})
    renderer, prompts = PromptRenderer(conversing=worker, max_prompt_tokens=2000), []
    for number, row in enumerate(work.rows):
        rendered = renderer.render(row, chat_tokenizer())
        prompts.append(Prompt(f"train/{number}", rendered.token_ids, rendered.text, row, messages=rendered.messages))
    loop = RolloutLoop(Dictated(work), listeners=[worker])
    sampling = SamplingParams(max_tokens=2000, max_observed=2000)
    began, cpu_began = time.perf_counter(), time.process_time()
    groups, _ = loop.collect(prompts, 1, sampling, seed=0)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    _check(work, [group.rollouts[0].completion.turns for group in groups])
    share = worker.metrics()["environments/waiting_share"]
    worker.close()
    return {"seconds": round(seconds, 2), "cpu_s": round(cpu_s, 2), "waiting_share": round(share, 3)}


def trls(work: Work) -> float:
    """Return the seconds of TRL's rollout."""
    import torch
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    rows = work.rows
    dictated = [turns_of(row) for row in rows]
    taken: dict[int, list[list[int]]] = {}
    spent: list[float] = []

    class Dictating(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            completions = []
            for ids in prompt_ids:
                number = int(re.findall(r"Trajectory (\d+)", chat_tokenizer().decode(ids))[0])
                taken.setdefault(number, []).append(dictated[number][len(taken.get(number, []))])
                completions.append(taken[number][-1])
            time.sleep(work.step_s * max(map(len, completions)))
            return completions, None

        def _generate(self, prompts: Any) -> Any:
            began = time.perf_counter()
            made = super()._generate(prompts)
            spent.append(time.perf_counter() - began)
            return made

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(chat_tokenizer()), **sizes, **more))
    trainer = Dictating(
        model=model,
        processing_class=chat_tokenizer(),
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        environment_factory=Waits,  # pyrefly: ignore[bad-argument-type]
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=work.trajectories,
            num_generations=2,
            max_completion_length=4000,
            use_cpu=True,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
        ),
    )
    with torch.no_grad():
        trainer._generate_and_score_completions([dict(row) for row in rows])
    _check(work, [taken[number] for number in range(work.trajectories)])
    return spent[0]


def _check(work: Work, turns: Sequence[Sequence[Sequence[int]]]) -> None:
    """Check that all turns of all trajectories were taken."""
    expected = [turns_of(row) for row in work.rows]
    if [list(map(list, each)) for each in turns] != expected:
        raise SystemExit("A system has not taken the turns that were dictated; nothing is measured.")


def main(options: Options) -> int:
    """Measure all three."""
    work = Work(6, 2, 0.05, 0.001) if options.quick else Work()
    note(f"{work.trajectories} trajectories, TRL takes longest")
    alone_s = work.bound_s()
    rows: list[Row] = [
        {"system": "bound", "seconds": round(alone_s, 2)},
        {"system": "lit_grpo", **ours(work, lock_step=False)},
        {"system": "lit_grpo in lock-step", **ours(work, lock_step=True)},
        {"system": "TRL", "seconds": round(trls(work), 2)},
    ]
    _, ours_s, lock_step_s, trl_s = (float(row["seconds"]) for row in rows)
    for row in rows:
        row["over_bound"] = round(float(row["seconds"]) / alone_s, 2)
    claims = [
        Claim("TRL's seconds over ours", trl_s / ours_s, ">=", TIMES_FASTER_THAN_TRL),
        Claim("our own lock-step's seconds over ours", lock_step_s / ours_s, ">=", TIMES_FASTER_THAN_LOCK_STEP),
        Claim("our seconds over the bound", ours_s / alone_s, "<=", MOST_OVER_BOUND),
    ]
    settings: Row = {
        "trajectories": work.trajectories,
        "turns": f"2 to {work.most_turns + 1}",
        "calls": f"0 to {work.longest_s:g} s, the cube of a uniform number",
        "step_s": work.step_s,
        "seconds of all calls": round(sum(sum(row["seconds"]) for row in work.rows), 1),
    }
    return finish("turns", options, settings, rows, claims)


if __name__ == "__main__":
    assert __doc__ is not None
    need("trl")
    sys.exit(main(parse_options(__doc__)))
