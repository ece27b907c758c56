"""Makes ``tiny``, the embedded policy that comes with the package: ``python -m scripts.make_tiny [FOLDER]``.

``--policy tiny_hybrid`` makes the one of recurrent layers and attention in its place. A tiny Qwen3, or Qwen3.5, is
warm-started on :func:`lit_grpo.tasks.arithmetic.demonstration`: first on whole workings, then on
a crowd most of whom answer hastily. What comes out can do the working, and mostly does not: GRPO is to find
that the working pays. The same seed gives the same weights, bit for bit, on one kind of CPU; on another they
round otherwise, and differ, so it is shipped, and not made where it is used.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lit_grpo.data import RowSource
from lit_grpo.policy.named import NAMED, TINY, TINY_HYBRID
from lit_grpo.rewards import ExactMatch
from lit_grpo.tasks import ArithmeticRows
from lit_grpo.tasks.arithmetic import ALPHABET, ANSWER_PATTERN, CONTINUE, demonstration, draw_exercise

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
PAD_ID, EOS_ID = 0, 1
Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Task:
    """The task that a policy is made for.

    Args:
        alphabet: Every character of a prompt or of a completion.
        draw: Draws a prompt and a demonstration of the train split, by a recipe: a whole working, or the crowd's.
        rows: Gives so many held-out rows.
        answer_pattern: Finds the answer in a completion.
        max_tokens: The most tokens of a completion.
    """

    alphabet: str
    draw: Callable[[TinyRecipe, random.Random, bool], tuple[str, str]]
    rows: Callable[[int], RowSource]
    answer_pattern: str
    max_tokens: int


@dataclass(frozen=True)
class TinyRecipe:
    """Everything but the seed that determines the policy.

    Args:
        hidden_size: Width.
        num_layers: Depth.
        intermediate_size: Width of the MLPs.
        num_heads: Query heads, of 32 dimensions each.
        num_kv_heads: Key and value heads.
        rope_theta: Base of the rotary embedding; small, for all that matters here is near.
        linear_layers: Layers with a gated DeltaNet in the place of attention; with any, the policy is a Qwen3.5.
        linear_head_dim: Dimensions of a head of theirs; they have ``num_heads`` heads.
        max_positions: The most tokens of prompt and completion.
        num_steps: Optimizer steps of the warm start.
        batch_tokens: Tokens of one step.
        learning_rate: Peak, of AdamW for embeddings and norms.
        matrix_learning_rate: Peak, of Muon for the matrices.
        crowd_steps: How many of the last steps show the hasty crowd; those before show whole workings.
        hasty: Share of the crowd that answers at once.
        impatient: Share of the crowd that gives up half-way.
        max_divisor: The largest divisor of the exercises shown.
        max_working: The most subtractions of the exercises shown.
        more: Chance of one more subtraction in the whole workings; above the task's, for more is learned of
            a long working.
        sharpness: The logits are scaled by this in the end, so that sampling at temperature 1 slips less.
    """

    hidden_size: int = 128
    num_layers: int = 2
    intermediate_size: int = 640
    num_heads: int = 8
    num_kv_heads: int = 4
    rope_theta: float = 100.0
    linear_layers: tuple[int, ...] = ()
    linear_head_dim: int = 16
    max_positions: int = 512
    num_steps: int = 660
    batch_tokens: int = 1024
    learning_rate: float = 4e-3
    matrix_learning_rate: float = 0.02
    crowd_steps: int = 100
    hasty: float = 0.7
    impatient: float = 0.1
    max_divisor: int = 39
    max_working: int = 18
    more: float = 0.85
    sharpness: float = 1.5


RECIPES = {
    TINY: TinyRecipe(),
    TINY_HYBRID: TinyRecipe(
        hidden_size=80,
        num_layers=3,
        intermediate_size=192,
        num_heads=4,
        num_kv_heads=2,
        linear_layers=(0, 1),
    ),
}
"""Of the policies of arithmetic."""


def make_tokenizer(alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token a character of ``alphabet``; it adds no token of its own."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make(folder: Path, recipe: TinyRecipe | None = None, seed: int = 0, task: Task | None = None) -> None:
    """Make a policy and its tokenizer, and write them as ``save_pretrained`` does.

    Args:
        folder: Where they go.
        recipe: Sizes and steps.
        seed: Of the weights and of the demonstrations.
        task: What it learns, arithmetic by default.
    """
    recipe, task = recipe or TinyRecipe(), task or ARITHMETIC
    tokenizer = make_tokenizer(task.alphabet)
    model = new_model(recipe, seed, tokenizer)
    warm_start(model, tokenizer, recipe, seed, task)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def exact_match(folder: Path, num_rows: int = 256, task: Task | None = None) -> float:
    """Share of held-out exercises that the policy in ``folder`` answers rightly, decoded greedily as in the demo."""
    task = task or ARITHMETIC
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    rows = list(task.rows(num_rows).rows())
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    new = {"max_new_tokens": task.max_tokens, "do_sample": False}
    ids_BT = model.generate(prompts.input_ids, attention_mask=prompts.attention_mask, **new)
    ids_BT = ids_BT[:, prompts.input_ids.shape[1] :]
    score = ExactMatch(pattern=task.answer_pattern)
    texts = tokenizer.batch_decode(ids_BT, skip_special_tokens=True)
    return sum(score(text, answer=row["answer"]) or 0.0 for text, row in zip(texts, rows, strict=True)) / num_rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Make it on one thread, and say how good it is."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--policy", choices=RECIPES, default=TINY)
    options, others = parser.parse_known_args(arguments)
    folder = read_folder("make_tiny", NAMED[options.policy].folder, others)
    make(folder, RECIPES[options.policy])
    print(f"{folder}: {exact_match(folder):.1%} of the held-out exercises are right, decoded greedily.")


def read_folder(name: str, shipped: Path, arguments: Sequence[str] | None) -> Path:
    """Read the command line of a script that makes a policy, and set it to one thread."""
    parser = argparse.ArgumentParser(prog=f"python -m scripts.{name}", description="Make an embedded policy.")
    parser.add_argument("folder", type=Path, nargs="?", default=shipped, help="by default that of the package")
    torch.set_num_threads(1)  # sums of several threads round otherwise
    return parser.parse_args(arguments).folder


def new_model(recipe: TinyRecipe, seed: int, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Make the model of ``recipe`` with random weights, the global random state left as it was."""
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads,
        "head_dim": 32,
        "max_position_embeddings": recipe.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if not recipe.linear_layers:
            return Qwen3ForCausalLM(Qwen3Config(**sizes))
        linear = [number in recipe.linear_layers for number in range(recipe.num_layers)]
        sizes["layer_types"] = ["linear_attention" if each else "full_attention" for each in linear]
        sizes |= {f"linear_num_{kind}_heads": recipe.num_heads for kind in ("key", "value")}
        sizes |= {f"linear_{kind}_head_dim": recipe.linear_head_dim for kind in ("key", "value")}
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes))


def warm_start(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    recipe: TinyRecipe,
    seed: int,
    task: Task | None = None,
) -> None:
    """Train ``model`` in place on demonstrations, the loss on their completions only."""
    matrices = [weight for name, weight in model.named_parameters() if weight.dim() == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.dim() != 2 or "embed" in name]
    # Muon (K. Jordan et al., 2024) learns this in far fewer steps than AdamW alone.
    optimizers = {
        torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"): recipe.matrix_learning_rate,
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0): recipe.learning_rate,
    }
    for step, rows in enumerate(_lessons(recipe, random.Random(seed), task or ARITHMETIC)):
        input_ids_BT, target_ids_BT = _collate(rows, tokenizer)
        logits_BTV = model(input_ids=input_ids_BT, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), target_ids_BT.flatten())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        share = _schedule(step, recipe.num_steps)
        for optimizer, peak in optimizers.items():
            optimizer.param_groups[0]["lr"] = peak * share
            optimizer.step()
    with torch.no_grad():
        offset = 1.0 if recipe.linear_layers else 0.0  # the norms of a Qwen3.5 multiply by one more than the weight
        model.model.norm.weight.add_(offset).mul_(recipe.sharpness).sub_(offset)


def _schedule(step: int, num_steps: int) -> float:
    """Share of the peak learning rate: a short linear rise, then half a cosine down to 2%."""
    rise = min(1.0, (step + 1) / 30)
    return rise * (0.02 + 0.49 * (1 + math.cos(math.pi * step / num_steps)))


def _lessons(recipe: TinyRecipe, rng: random.Random, task: Task) -> Iterator[Rows]:
    """Yield the batch of each step: whole workings, then the crowd."""
    yield from islice(_batches(recipe, rng, True, task), recipe.num_steps - recipe.crowd_steps)
    yield from islice(_batches(recipe, rng, False, task), recipe.crowd_steps)


def _batches(recipe: TinyRecipe, rng: random.Random, whole: bool, task: Task | None = None) -> Iterator[Rows]:
    """Yield batches of rows of similar length, each padded to at most ``batch_tokens``, without end."""
    draw = (task or ARITHMETIC).draw
    while True:
        rows = sorted((draw(recipe, rng, whole) for _ in range(1000)), key=_num_tokens)
        batches: list[Rows] = [[]]
        for row in rows:
            if batches[-1] and (len(batches[-1]) + 1) * _num_tokens(row) > recipe.batch_tokens:
                batches.append([])
            batches[-1].append(row)
        rng.shuffle(batches)
        yield from batches


def _row(recipe: TinyRecipe, rng: random.Random, whole: bool) -> tuple[str, str]:
    more = recipe.more if whole else CONTINUE
    exercise = draw_exercise(rng, "train", recipe.max_divisor, recipe.max_working, more)
    hasty, impatient = (0.0, 0.0) if whole else (recipe.hasty, recipe.impatient)
    return exercise.prompt, demonstration(exercise, rng, hasty, impatient)


ARITHMETIC = Task(ALPHABET, _row, lambda num_rows: ArithmeticRows(num_rows, "validation"), ANSWER_PATTERN, 128)


def _num_tokens(row: tuple[str, str]) -> int:
    return len(row[0]) + len(row[1]) + 1


def _collate(rows: Rows, tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    num_columns = max(map(_num_tokens, rows))
    input_ids_BT = torch.full((len(rows), num_columns), PAD_ID)
    target_ids_BT = torch.full_like(input_ids_BT, -100)
    for row, (prompt, completion) in enumerate(rows):
        ids_T = torch.tensor([*tokenizer.encode(prompt + completion), EOS_ID])
        input_ids_BT[row, : len(ids_T)] = ids_T
        target_ids_BT[row, len(prompt) - 1 : len(ids_T) - 1] = ids_T[len(prompt) :]
    return input_ids_BT, target_ids_BT


if __name__ == "__main__":
    main()
