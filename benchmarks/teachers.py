"""Learning from a teacher: how soon a policy has learned, and what an update takes beside TRL's DistillationTrainer.

``taught_demo``: the policy after the demo's 60 updates teaches the one before them, alone (completions are scored by
the teacher, and rewards are only logged) or beside rewards. What is measured is when each seed's greedy exact match on
held-out exercises first comes to 95%: updates, sampled tokens, and CPU seconds of rollouts and updates, with the
teacher's scoring and without validations. Each is tried at the demo's learning rate and at twice that, and the
best counts. What it took to make the teacher is not counted.

``taught_smollm2``: the same with SmolLM2 after ten updates of word problems, until 65% are right (it begins with 40%),
beside SDPO, whose teacher is the policy with a right completion of the group in its prompt, and beside GRPO after
supervised fine-tuning on 200 solved problems. Validation is after every fifth update.

``taught_by_larger``: a policy is taught by a larger one with the same tokenizer (``--policy`` and ``--teacher``), by
``distill`` or by ``sft`` on the teacher's greedy answers to the training prompts, beside GRPO, which has no teacher.
All train LoRA adapters. The task is a sum of decimal numbers of reasoning-gym, with answers of about twelve tokens.
Each is run at two learning rates, around that which served adapters of SmolLM2 best (``lora_word_problems``), GRPO at
a lower one too, and the best counts. Tokens are those that were sampled, by the teacher for ``sft``, and its seconds
count too.

``distill_vs_trl``: an update from finished completions to changed weights, with the teacher's scoring, on the same
tokens, policies and memory switches: ours is a fit of GRPOModule with ``distill``, TRL's is DistillationTrainer's own
preparation, loss and backward, and both have the same fused AdamW. Steps are taken in turn, and seconds are CPU
seconds, for the machine is shared. TRL compares the whole vocabulary at each token, and ours the sampled tokens, or
with ``top_k`` the teacher's likeliest tokens and a tail. As installed TRL's head also computes padded tokens on a CPU;
*GPU path of its head* leaves them out, and what counts is the best of all rows. Memory is the peak above the process
with both models loaded. The floor is the work that no method can do without: a forward and backward pass of the policy
and a forward pass of the teacher, each prompt once; without sharing it is computed once for each of its completions.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.learning import measure, part_of, quick_form
from benchmarks.learning_runs import LearningRun, kept_runs, train_all
from benchmarks.learning_studies import (
    HELD_OUT,
    NUM_ROWS,
    PLUGINS,
    QUICK,
    RATE,
    Bound,
    Study,
    System,
    Task,
)
from benchmarks.report import ROOT, Claim, Options, Row, finish, need, options_parser, write
from benchmarks.update_case import TIMED_ROWS, Case, Steps
from benchmarks.update_vs_trl import in_turn
from benchmarks.update_work import SIGMA, Work
from lit_grpo.tasks.word_problems import ANSWER_PATTERN, WordProblemRows

LEVEL, SHARE = 0.95, 1 / 3
CORRECT = {"function": "exact_match", "name": "correct", "args": {"pattern": r"(?:^|=)(\d+)$"}}
RATES = (1, 2)
"""Learning rates that each system is tried at, in multiples of the demo's 1e-3."""
GRPO, BESIDE, ALONE, LIKELIEST = "GRPO", "distill beside rewards", "distill", "distill:top_k=15"


def _demo(teacher: Path) -> Study:
    """The demo's last policy teaches the first; alone it teaches a quarter of the completions, of twice the prompts."""
    logged = {"model.rewards": json.dumps([CORRECT | {"weight": 0.0}])}
    few = {"data.batch_size": 32, "model.num_generations": 2}
    kinds: dict[str, dict[str, Any]] = {
        GRPO: _updates(24, 1),  # of which one seed in three needs more than twelve
        BESIDE: _taught(teacher, "distill"),
        ALONE: _taught(teacher, "distill") | logged | few,
        LIKELIEST: _taught(teacher, LIKELIEST) | logged | few,
    }
    systems = {
        at_rate(name, times): System(fields | {RATE: times * 1e-3}) for times in RATES for name, fields in kinds.items()
    }
    every_rate = {name: tuple(at_rate(name, times) for times in RATES) for name in kinds}
    return Study(
        tasks={"arithmetic": Task("arithmetic", systems)},
        fields=_updates(12, 1) | {HELD_OUT: 512},
        seeds=(1, 2, 3),
        level=LEVEL,
        bounds=tuple(
            Bound(
                f"{what} to {LEVEL:.0%} held-out at the best rate, over GRPO's at its best",
                f"{column}_to_{LEVEL:g}", "<=", SHARE, of=every_rate[name], over=every_rate[GRPO], best=True,
            )
            for what, column in (("updates", "updates"), ("sampled tokens", "tokens"), ("CPU seconds", "cpu_s"))
            for name in (ALONE, LIKELIEST)
        ),
        quick=tuple(kinds),
    )  # fmt: skip


def at_rate(name: str, times: int) -> str:
    """A system's name with its learning rate, in multiples of the demo's."""
    return name if times == 1 else f"{name}, {times} x"


def _taught(teacher: Path, *plugins: str) -> dict[str, Any]:
    return {"model.teacher.policy": teacher, PLUGINS: json.dumps(plugins)}


def _smollm2(teacher: Path) -> Study:
    """SmolLM2 after ten updates of word problems teaches SmolLM2."""
    logged = {"model.rewards": json.dumps([NUMBER | {"weight": 0.0}])}
    examples = teacher.with_name("solved.jsonl")
    examples.write_text("".join(json.dumps(solved(row)) + "\n" for row in WordProblemRows(SOLVED, seed=1).rows()))
    warm_start = {"data": str(examples), "column": "solution", "warm_up": 5, "per_update": SOLVED // 5, "weight": 0}
    live = {"model.teacher.policy": "live", "model.objective.normalization": "sequence"}
    kinds: dict[str, dict[str, Any]] = {
        GRPO: {},
        "distill:top_k=32": _taught(teacher, "distill:top_k=32") | logged | {"model.num_generations": 4},
        "SDPO": live | {PLUGINS: json.dumps([{"sdpo": {"weight": 0.5}}])},
        "SFT, then GRPO": _updates(15, 5) | {PLUGINS: json.dumps([{"sft": warm_start}])},
    }
    return Study(
        tasks={"word_problems": Task("word_problems", {name: System(of, alone=True) for name, of in kinds.items()})},
        fields=_updates(10, 5),
        level=ALMOST,
        bounds=(
            Bound(f"sampled tokens to {ALMOST:.0%} held-out, over GRPO's", f"tokens_to_{ALMOST:g}", "<=", SHARE,
                  of=("distill:top_k=32",), over=GRPO),
            Bound("held-out accuracy at the end, less GRPO's", "final", ">=", 0.0,
                  of=("SDPO", "SFT, then GRPO"), less=GRPO),
        ),
        quick=(GRPO, "distill:top_k=32"),
    )  # fmt: skip


SOLVED, ALMOST = 200, 0.65
NUMBER = {"function": "exact_match", "name": "correct", "args": {"pattern": ANSWER_PATTERN}}


def solved(row: Mapping[str, Any]) -> dict[str, Any]:
    """A word problem with the solution that its two examples have the form of."""
    first, second = re.findall(r"\d+", row["prompt"][-1]["content"])
    sign = "+" if int(first) + int(second) == int(row["answer"]) else "-"
    return {"prompt": row["prompt"], "solution": f"{first} {sign} {second} = {row['answer']}"}


def _updates(number: int, every: int) -> dict[str, Any]:
    """Updates of a run, and from one validation to the next."""
    return {
        "trainer.max_steps": number,
        "trainer.val_check_interval": every,
        "model.lr_scheduler.init_args.total_iters": number,
    }


# ---- a larger teacher --------------------------------------------------------------------------------

LARGER, LORA_RATES, GRPO_RATES = "taught_by_larger", (1e-4, 3e-4), (3e-5, 1e-4, 3e-4)
SUMS = {"tasks": '["decimal_chain_sum"]', "levels": "0"}
SUMS_TOKENS = {"model.sampling.max_tokens": 24, "model.eval_sampling.max_tokens": 24}
SCORE = {"function": "lit_grpo.tasks.ReasoningGymScore", "name": "score"}


@dataclass(frozen=True)
class Answers:
    """Greedy answers of ``policy`` to so many training prompts."""

    name: str
    policy: str
    num_rows: int
    alone: bool = False

    def words(self, folder: Path) -> list[str]:
        """The arguments of the Python process in ``folder``."""
        source = "--data.predict.init_args."
        fields = {f"{source}{name}": value for name, value in (SUMS | {"split": "train"}).items()}
        fields |= {f"--{name}": str(value) for name, value in SUMS_TOKENS.items()}
        words = ["-m", "lit_grpo", "predict", "--config", str(ROOT / "configs" / "reasoning_gym.yaml")]
        words += ["--model.policy", self.policy, f"--{PLUGINS}", "[]", "--data.predict", "ReasoningGymRows"]
        return [*words, f"{source}num_rows", str(self.num_rows), *(word for each in fields.items() for word in each)]

    def examples(self, folder: Path) -> tuple[Path, int, float]:
        """Return a file of the answers that came to an end, the tokens of all, and the CPU seconds that they took."""
        cpu_s = folder / "cpu_s"
        began = os.times()
        train_all([self], folder.parent)
        if not cpu_s.exists():
            ended = os.times()
            spent = ended.children_user + ended.children_system - began.children_user - began.children_system
            cpu_s.write_text(f"{spent:.1f}")
        (answers,) = folder.glob("runs/*/completions.jsonl")
        rows = [json.loads(line) for line in answers.read_text().splitlines()]
        examples = folder / "examples.jsonl"
        examples.write_text(
            "".join(
                json.dumps({"prompt": row["columns"]["prompt"], "solution": row["completion"]}) + "\n"
                for row in rows
                if row["finish_reason"] == "stop"
            )
        )
        return examples, sum(len(row["token_ids"]) for row in rows), float(cpu_s.read_text())


def _larger(policy: str, teacher: str, quick: bool, folder: Path) -> Study:
    """The teacher is larger than the policy and has its tokenizer; all train adapters of rank 32."""
    prompts, updates = 2 if quick else 8, 2 if quick else 10
    answers = Answers("answers", teacher, prompts * updates)
    examples, tokens, seconds = answers.examples(folder / answers.name)
    logged = {"model.rewards": json.dumps([SCORE | {"weight": 0.0}])}
    imitates = {"data": str(examples), "column": "solution", "warm_up": updates, "per_update": 4 * prompts, "weight": 0}
    kinds = {
        GRPO: System(),
        "distill:top_k=32": System(_taught(Path(teacher), "distill:top_k=32") | logged),
        IMITATION: System({PLUGINS: json.dumps([{"sft": imitates}])}, before=(tokens, seconds)),
    }
    rates = {name: LORA_RATES[:1] if quick else GRPO_RATES if name == GRPO else LORA_RATES for name in kinds}
    at_rates = {name: tuple(f"{name}, {rate:g}" for rate in each) for name, each in rates.items()}
    systems = {
        name: replace(kinds[kind], fields=kinds[kind].fields | {RATE: rate})
        for kind, each in rates.items()
        for name, rate in zip(at_rates[kind], each, strict=True)
    }
    fields = {
        f"data.{part}.init_args.{name}": value for part in ("train", "validation") for name, value in SUMS.items()
    }
    lengths = {NUM_ROWS: prompts * updates, "data.batch_size": prompts, "model.num_generations": 4}
    return Study(
        tasks={"decimal sums": Task("reasoning_gym", systems)},
        fields=fields
        | SUMS_TOKENS
        | lengths
        | {"trainer.max_steps": updates, "trainer.val_check_interval": max(updates // 5, 1)}
        | {PLUGINS: "[]", "model.policy": policy, "model.lora.r": 32, "model.lora.alpha": 32}
        | {HELD_OUT: 4 if quick else 96, "data.eval_batch_size": 96},
        seeds=(0,),
        picture=("tokens", "seconds"),
        bounds=tuple(
            Bound(
                "held-out accuracy at the end at the better rate, over GRPO's at its best",
                "final", ">=", 1.0, of=at_rates[name], over=None if quick else at_rates[GRPO], best=True,
            )
            for name in kinds
            if name != GRPO
        ),
    )  # fmt: skip


IMITATION = "sft on the teacher's answers"

STUDIES: dict[str, tuple[str, int, Callable[[Path], Study]]] = {
    "taught_demo": ("arithmetic", 60, _demo),
    "taught_smollm2": ("word_problems", 10, _smollm2),
}
"""The configuration and the updates that make the teacher, and what it teaches."""

# ---- beside TRL ---------------------------------------------------------------------------------------

WORKS = {
    "long prompt": (Work(512, 128, 16, max_tokens=512), ((576, 1), (4096, 4))),
    "long completions": (Work(64, 256, 16, max_tokens=640), ((640, 1), (4096, 4))),
}
"""Each with the sizes of micro-batches that are tried: tokens of ours, and rows of TRL's."""
OURS: tuple[str, ...] = ("distill", "distill:top_k=64")
TIMES, MEMORY = 0.5, 0.5
BESIDE_TRL = "distill_vs_trl"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study."""
    parser = options_parser(__doc__ or "")
    parser.add_argument("study", choices=(*STUDIES, LARGER, BESIDE_TRL))
    parser.add_argument("--teacher", default="smollm2", help=f"of {LARGER}: a policy, with the tokenizer of --policy")
    parser.add_argument("--system", nargs="+", help="of a study of learning; by default all, with claims")
    asked = parser.parse_args(arguments)
    options = Options(asked.quick, asked.device, asked.policy, asked.output)
    if asked.study == BESIDE_TRL:
        need("trl")
        return _beside_trl(options)
    if asked.study == LARGER:
        with kept_runs("teachers", options) as folder:
            study = _larger(options.policy or "smollm2", asked.teacher, options.quick, folder)
            study = part_of(study, None, asked.system) if asked.system else study
            program = f"teachers {LARGER} --teacher {'FOLDER' if Path(asked.teacher).exists() else asked.teacher}"
            return measure(LARGER, study, options, program, judges=not asked.system)
    config, updates, study = STUDIES[asked.study]
    with kept_runs("teachers", options) as folder:
        words = ["--trainer.max_steps", str(updates), "--model.lr_scheduler.init_args.total_iters", str(updates)]
        words += ["--trainer.limit_val_batches", "0"]
        if options.quick:
            words += [word for name, value in QUICK.items() for word in (f"--{name}", str(value))]
        run = LearningRun(f"teacher-{config}", config, tuple(words))
        train_all([run], folder)
        (teacher,) = (folder / run.name).glob("runs/*/policy")
        taught = quick_form(study(teacher)) if options.quick else study(teacher)
        taught = part_of(taught, None, asked.system) if asked.system else taught
        return measure(asked.study, taught, options, f"teachers {asked.study}", judges=not asked.system)


def _beside_trl(options: Options) -> int:
    """Take steps of both sides in turn, and compare."""
    work, sizes = WORKS["long prompt"]
    case = Case("lit_grpo", 0, work, device=options.device, teacher="76M", cpu_time=True, first=TIMED_ROWS)
    works, switches, repeats, program = WORKS, (False, True), 2, f"teachers {BESIDE_TRL}"
    if options.quick:
        works, switches, repeats = {"quick": (Work(48, 12, 8, vocab_size=512), sizes := sizes[1:])}, (True,), 1
        case = replace(case, policy="smallest", teacher="smallest", first=None)
    settings: Row = {
        "policy": f"random Qwen3, {case.policy}",
        "teacher": f"random Qwen3, {case.teacher}",
        "lengths": f"log-normal, sigma {SIGMA}",
        "vocab_size": case.work.vocab_size,
        "threads": case.threads,
        "repeats": f"{repeats} of each setting, all in turn",
        "trl": f"{TIMED_ROWS} rows timed, scaled to all",
    }
    measured: dict[tuple[str, bool], list[Steps]] = {}
    rows, claims = list[Row](), list[Claim]()
    for place, (name, checkpointing) in product(range(len(sizes)), product(works, switches)):
        work, tried = works[name]
        num_tokens, num_rows = tried[place]
        mine = replace(case, work=work, checkpointing=checkpointing)
        peer = replace(mine, size=num_rows, system="TRL, GPU path of its head")
        cases = [*(replace(mine, size=num_tokens, plugin=plugin) for plugin in OURS), peer]
        if not checkpointing and not place:
            cases.append(replace(peer, system="TRL"))
        measured.setdefault((name, checkpointing), []).extend(in_turn(cases, repeats))
        rows = [_row(of[0], steps) for of, several in measured.items() for steps in several]
        claims = [claim for (named, _), several in measured.items() for claim in _claims(named, several)]
        write(BESIDE_TRL, options, settings, rows, claims, program)  # what is there if it is cut off
    return finish(BESIDE_TRL, options, settings, rows, claims, program)


def _row(name: str, steps: Steps) -> Row:
    case, figures, seconds = steps.case, steps.figures, _seconds(steps)
    return {
        "system": case.system if case.plugin is None else f"lit_grpo, {case.plugin}",
        "work": f"{name}: {case.work.prompt_tokens} + {case.work.mean_tokens} x {case.work.group_size}",
        "checkpointing": "yes" if case.checkpointing else "no",
        "micro-batch": f"{case.size} {'rows' if case.plugin is None else 'tokens'}",
        "cpu_s": round(seconds, 3),
        "spread_s": round(max(steps.seconds) - min(steps.seconds), 3),
        "peak_mib": round(figures["peak_mib"], 1),
        "above_state_mib": round(figures["peak_mib"] - figures["state_mib"], 1),
        "floor_tflop": round(figures["floor_tflop"], 4),
        "unshared_floor_tflop": round(figures["unshared_floor_tflop"], 4),
        "share_of_matmul_rate": round(statistics.median(steps.shares), 3),
    }


def _seconds(steps: Steps) -> float:
    return statistics.median(steps.seconds)


def _claims(name: str, measured: Sequence[Steps]) -> list[Claim]:
    theirs = [steps for steps in measured if steps.case.plugin is None]
    state_mib = theirs[0].figures["state_mib"]
    what = f"{name}, both {'with' if theirs[0].case.checkpointing else 'without'} checkpointing"
    fastest = min(map(_seconds, theirs))
    least, least_above = (min(steps.figures["peak_mib"] - state for steps in theirs) for state in (0, state_mib))
    claims: list[Claim] = []
    for plugin in OURS:
        ours = [steps for steps in measured if steps.case.plugin == plugin]
        peak = min(steps.figures["peak_mib"] for steps in ours)
        claims += [
            Claim(f"{what}, {plugin}: CPU seconds at the fastest over TRL's", min(map(_seconds, ours)) / fastest,
                  "<=", TIMES),
            Claim(f"{what}, {plugin}: least peak above the weights over TRL's", peak / least, "<=", MEMORY),
            Claim(f"{what}, {plugin}: the same above gradients and moments", (peak - state_mib) / least_above,
                  "<=", MEMORY),
        ]  # fmt: skip
    return claims


if __name__ == "__main__":
    sys.exit(main())
