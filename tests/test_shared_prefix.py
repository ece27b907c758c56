"""Packed rows beside the model's own forward, one rollout after another, on unmodified Hugging Face decoders."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import torch
import transformers
from conftest import random_policy, table_rows
from hand_made import make_micro_batch, make_rollout, relative_error
from torch._higher_order_ops import inductor_compiled_code
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lit_grpo.policy.architecture.decoder import logit_map
from lit_grpo.policy.architecture.states import state_layers
from lit_grpo.types import MutualSpan, Rollout
from lit_grpo.update.batches.layout import LEAST_SHARED, in_order
from lit_grpo.update.batches.microbatch import make_micro_batches
from lit_grpo.update.logprobs.checkpointing import KEPT, KeptBytes, checkpoint_layers
from lit_grpo.update.logprobs.forward import micro_batch_logprobs
from lit_grpo.update.prefix import flex
from lit_grpo.update.prefix import layout as prefix_layout
from lit_grpo.update.prefix.flex import flex_prefix_attention, prefix_block_mask
from lit_grpo.update.prefix.layout import Stretch, attention_pieces, key_labels, piecewise_attention, sees_ahead
from lit_grpo.update.prefix.sharing import shared_prefixes
from lit_grpo.update.prefix.support import prefix_refusal
from tests.doubles.small_models import small_model

hf: Any = transformers
SIZES: dict[str, Any] = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "initializer_range": 0.05,
    "attention_dropout": 0.0,
}
WINDOW = {"sliding_window": 9}
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES)),
    "qwen3-sliding": lambda: hf.Qwen3ForCausalLM(
        hf.Qwen3Config(**SIZES, **WINDOW, use_sliding_window=True, max_window_layers=1)
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "mistral-sliding": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, **WINDOW)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**SIZES)),
    "gemma3-mixed": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**SIZES, **WINDOW, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    ),
    "qwen3.5-hybrid": lambda: hf.Qwen3_5ForCausalLM(
        hf.Qwen3_5TextConfig(
            **SIZES,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
        )
    ),
    "gemma2-capped": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**SIZES, **WINDOW, attn_logit_softcapping=0.5, attn_implementation="eager")
    ),
    "gpt-oss-sinks": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**SIZES, **WINDOW, num_local_experts=2, num_experts_per_tok=2)
    ),
    "lfm2-hybrid": lambda: hf.Lfm2ForCausalLM(
        hf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False)
    ),
    "mamba": lambda: small_model("mamba", {"num_hidden_layers": 3, "max_position_embeddings": 256}),
}  # fmt: skip

QUICK = ("qwen3", "gemma3-mixed", "qwen3.5-hybrid", "mamba")  # attention, windows, states, states of one token
TOLERANCES = {"mamba": 4e-6}
"""Where other families round to less than 1e-6."""


def mixed_rows(values: Sequence[Any], quick: Sequence[str] = QUICK) -> list[Any]:
    """Every family with every value; quick are these families, each with the next value."""
    return table_rows(itertools.product(FAMILIES, values), list(zip(quick, itertools.cycle(values), strict=False)))


def family(name: str) -> Any:
    """A random model in training mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return FAMILIES[name]().train()


def with_lora(model: Any) -> Any:
    """Adapters on attention and feed-forward, or on what Mamba has for them, away from zero."""
    from peft import LoraConfig, get_peft_model

    names = ["x_proj"] if model.config.model_type == "mamba" else ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=names, init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 0.1
    return model


def ragged_rollouts(seed: int = 0, group_sizes: tuple[int, ...] = (5, 1, 4)) -> list[Rollout]:
    """Groups of rollouts; one response has a single token, and prompts are longer than the window of some models."""
    rng = random.Random(seed)
    rollouts = []
    for number, size in enumerate(group_sizes):
        prompt = [rng.randrange(2, 41) for _ in range(rng.choice([3, 8, 14, 25]))]
        for sample in range(size):
            length = 1 if sample == 1 else rng.randint(2, 24)
            tokens = [rng.randrange(2, 41) for _ in range(length)]
            rollouts.append(make_rollout(prompt, tokens, prompt_id=f"train/{number}", sample_id=sample))
    return rollouts


def upstream(rollout: Rollout) -> torch.Tensor:
    """What the loss's gradient is at each of a rollout's log-probs."""
    tokens_T = rollout.completion.token_ids_T.float()
    return torch.sin(tokens_T + rollout.completion.request.path[0] + len(rollout.prompt.token_ids))


def gradients(model: Any) -> torch.Tensor:
    grads = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert all(grad is not None for grad in grads)
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def plain(model: Any, rollouts: list[Rollout]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Log-probs of each rollout and the gradient, by the model's own forward on one rollout at a time."""
    model.zero_grad()
    logprobs = {}
    for rollout in rollouts:
        prompt, completion_T = rollout.prompt.token_ids, rollout.completion.token_ids_T
        input_ids = torch.cat([torch.tensor(prompt), completion_T])[None]
        logits_TV = model(input_ids=input_ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs_T = logits_TV.log_softmax(-1).gather(-1, completion_T[:, None])[:, 0]
        (logprobs_T * upstream(rollout)).sum().backward()
        logprobs[id(rollout)] = logprobs_T.detach()
    return logprobs, gradients(model)


def check_against_plain(
    model: Any,
    max_tokens: int = 10_000,
    tolerance: float | None = None,
    rollouts: list[Rollout] | None = None,
    least_shared: int = LEAST_SHARED,
) -> int:
    """Compare; return how many micro-batches there were."""
    tolerance = tolerance or TOLERANCES.get(model.config.model_type, 1e-6)
    rollouts = ragged_rollouts() if rollouts is None else rollouts
    expected, gradient = plain(model, rollouts)
    model.zero_grad()
    micro_batches = make_micro_batches(rollouts, max_tokens, least_shared=least_shared)
    with shared_prefixes(model):
        for micro_batch in in_order(micro_batches):
            members = [rollouts[row] for row in micro_batch.rows]
            logprobs_N, _ = micro_batch_logprobs(model, micro_batch, 1.0)
            expected_N = torch.cat([torch.empty(0), *(expected[id(rollout)] for rollout in members)])
            assert not members or relative_error(logprobs_N.detach(), expected_N) < tolerance
            (logprobs_N * torch.cat([torch.empty(0), *map(upstream, members)])).sum().backward()
    assert relative_error(gradients(model), gradient) < tolerance
    return len(micro_batches)


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_plain_path(name: str) -> None:
    assert check_against_plain(family(name)) == 1


@pytest.mark.parametrize(("name", "checkpointing"), mixed_rows([True, "selective"], QUICK[:-1]))
def test_and_with_gradient_checkpointing(name: str, checkpointing: Any) -> None:
    model = family(name)
    checkpoint_layers(model, checkpointing)
    check_against_plain(model)


def test_selective_checkpointing_keeps_matrix_products_and_computes_the_rest_again() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    flops = []
    for checkpointing in (False, "selective", True):
        model = family("qwen3")
        checkpoint_layers(model, cast("Any", checkpointing))
        with FlopCounterMode(display=False) as counter, shared_prefixes(model):
            micro_batch = make_micro_batch(ragged_rollouts(), [0.0] * len(ragged_rollouts()))
            micro_batch_logprobs(model, micro_batch, 1.0)[0].sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] < flops[2]


@pytest.mark.parametrize(("name", "checkpointing"), mixed_rows([False, True], QUICK[:-1]))
def test_and_with_lora(name: str, checkpointing: bool) -> None:
    model = with_lora(family(name))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    check_against_plain(model)


@pytest.mark.parametrize(("name", "max_tokens"), mixed_rows([25, 49, 60]))
def test_and_with_groups_split_over_micro_batches(name: str, max_tokens: int) -> None:
    assert check_against_plain(family(name), max_tokens) >= 3


@pytest.mark.parametrize(
    ("lora", "checkpointing", "name"),
    table_rows(
        itertools.product([False, True], [True, "selective"], QUICK[:-1]),
        [(True, "selective", "qwen3"), (False, True, "gemma3-mixed")],
    ),
)
def test_and_with_split_groups_checkpointing_and_lora(lora: bool, checkpointing: Any, name: str) -> None:
    model = family(name)
    checkpoint_layers(model, checkpointing)
    assert check_against_plain(with_lora(model) if lora else model, 49) >= 3


def test_the_prompt_of_a_split_group_goes_through_the_model_twice_however_many_micro_batches_there_are() -> None:
    model, seen = family("qwen3"), []
    logit_map(model)  # which is found out once, by a call of the decoder
    model.get_decoder().register_forward_pre_hook(
        lambda _, __, kwargs: seen.append((kwargs["input_ids"].shape[1], torch.is_grad_enabled())), with_kwargs=True
    )
    rollouts = [make_rollout([3] * 7, [4, 5, 6], sample_id=sample) for sample in range(10)]
    with shared_prefixes(model):
        for micro_batch in in_order(make_micro_batches(rollouts, 10)):  # three completions, or the prompt and one
            micro_batch_logprobs(model, micro_batch, 1.0)[0].sum().backward()
    assert seen == [(7, False), (6, True), (6, True), (6, True), (9, True)]


def test_what_was_carried_of_a_prompt_is_given_up_in_its_last_micro_batch() -> None:
    model, rollouts = family("qwen3"), [make_rollout([3] * 7, [4, 5, 6], sample_id=sample) for sample in range(10)]
    references = []
    gc.disable()
    try:
        with shared_prefixes(model):
            for micro_batch in in_order(make_micro_batches(rollouts, 10)):
                micro_batch_logprobs(model, micro_batch, 1.0)[0].sum().backward()
                (prompt,) = (*micro_batch.carried, *(span for _, span in micro_batch.in_row))
                references += [weakref.ref(carried) for carried in prompt._carried.values()]
        assert len(references) == 3 * (2 * 3 + 1)  # keys and values of three layers, and the last hidden state
        assert not any(reference() for reference in references)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", table_rows(FAMILIES, QUICK))
def test_in_double_precision_they_agree_ten_times_closer(name: str) -> None:
    model = family(name).double()
    model.set_experts_implementation("eager")  # others know no float64
    # All norm and rotate in float32 all the same; layers with states, and eager attention, compute more in it.
    in_float32 = state_layers(model) or model.config._attn_implementation == "eager"
    check_against_plain(model, tolerance=None if in_float32 else 1e-7)


def tree_of_rollouts(depth: int, prompts: int = 2) -> list[Rollout]:
    """Of each prompt, rollouts that divide in two again and again; one is the beginning of another, one comes twice."""
    rng, rollouts = random.Random(1), []
    for number in range(prompts):
        prompt = [rng.randrange(2, 41) for _ in range(rng.randint(3, 12))]
        paths = [[rng.randrange(2, 41) for _ in range(5)]]
        for level in range(depth):
            paths = [[*path, *(rng.randrange(2, 41) for _ in range(6 + level))] for path in paths for _ in range(2)]
        paths += [paths[0][:9], paths[1]]
        rng.shuffle(paths)
        rollouts += [
            make_rollout(prompt, path, prompt_id=f"train/{number}", sample_id=n) for n, path in enumerate(paths)
        ]
    return rollouts


@pytest.mark.parametrize("name", table_rows(FAMILIES, QUICK))
def test_a_tree_of_rollouts_has_the_log_probs_and_gradients_of_the_plain_path(name: str) -> None:
    rollouts = tree_of_rollouts(depth=3)
    assert check_against_plain(family(name), rollouts=rollouts, least_shared=1) == 1
    (micro_batch,) = make_micro_batches(rollouts, 10_000, least_shared=1)
    num_alone = sum(rollout.completion.num_tokens - 1 for rollout in rollouts)
    num_distinct = 2 * (5 + 2 * 6 + 4 * 7 + 8 * 8 - 7)  # three leaves of each tree have a sibling, or longer ones
    in_branches = sum(stretch.length for stretch in micro_batch.stretches if stretch.first)
    assert in_branches <= num_distinct < num_alone / 1.5


@pytest.mark.parametrize(
    ("max_tokens", "checkpointing", "name"),
    table_rows(
        itertools.product([40, 70], [False, True, "selective"], QUICK),
        [(40, "selective", "qwen3"), (70, False, "gemma3-mixed")],
    ),
)
def test_and_with_trees_split_over_micro_batches(max_tokens: int, checkpointing: Any, name: str) -> None:
    model = family(name)
    checkpoint_layers(model, checkpointing)
    assert check_against_plain(model, max_tokens, rollouts=tree_of_rollouts(depth=3), least_shared=1) >= 4


def test_and_in_double_precision_closer() -> None:
    check_against_plain(family("qwen3").double(), tolerance=2e-7, rollouts=tree_of_rollouts(4), least_shared=1)


def test_what_completions_begin_with_in_common_stands_in_the_row_once_from_32_tokens_on() -> None:
    beginning = [random.Random(0).randrange(2, 41) for _ in range(40)]
    rollouts = [make_rollout([3], [*beginning[:end], *own], sample_id=n) for n, (end, own) in enumerate(
        [(40, [7, 7]), (40, [8, 8, 8]), (31, [9, 9])]
    )]  # fmt: skip
    (micro_batch,) = make_micro_batches(rollouts, 10_000)
    assert micro_batch.stretches == tuple(stretches_of([Group(1, (40, 1, 2, 32), (None, 0, 0, None))]))
    assert micro_batch.position_ids_BT[0].tolist() == [0, *range(1, 41), 41, 41, 42, *range(1, 33)]
    assert len(micro_batch.columns["unique"]) == 40 + 2 + 3 + 33 - 1  # one first token


class Group(NamedTuple):
    """A prompt and the tree of its responses: tokens of each branch, and the branch before it, None for the prompt.

    Tokens of the prompt's images, ``mutual``, see those of the same image that come after them.
    """

    prompt: int
    branches: tuple[int, ...]
    parents: tuple[int | None, ...]
    carried: bool = False
    mutual: tuple[MutualSpan, ...] = ()

    def below(self, number: int) -> list[int]:
        """The branches that come after one, directly or not."""
        children = [child for child, parent in enumerate(self.parents) if parent == number]
        return [each for child in children for each in (child, *self.below(child))]


def flat(prompt: int, *branches: int, carried: bool = False) -> Group:
    return Group(prompt, branches, (None,) * len(branches), carried)


def stretches_of(groups: list[Group]) -> list[Stretch]:
    """Where groups stand in a row, one after another; carried prompts after it."""
    stretches: list[Stretch] = []
    start, carried_at = 0, sum(sum(group.branches) + (0 if group.carried else group.prompt) for group in groups)
    for group in groups:
        number = len(stretches)
        at, last = carried_at if group.carried else start, number + len(group.branches)
        stretches.append(Stretch(at, 0, group.prompt, last, group.carried, group.mutual))
        carried_at += group.prompt if group.carried else 0
        start += 0 if group.carried else group.prompt
        for branch, (length, parent) in enumerate(zip(group.branches, group.parents, strict=True)):
            above = stretches[number if parent is None else number + 1 + parent]
            last = number + 1 + max([branch, *group.below(branch)])
            stretches.append(Stretch(start, above.first + above.length, length, last))
            start += length
    return stretches


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: list[Group],
    window: int | None,
    cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition: one mask over the whole row, token by token; capped scores and sinks are written out."""
    spans, carried = [], []  # group, the branches that it comes after and its own, position
    for number, group in enumerate(groups):
        prompt = [((number,), position) for position in range(group.prompt)]
        (carried if group.carried else spans).extend(prompt)
        ways: list[tuple[int, ...]] = []
        ends: list[int] = []
        for index, (length, parent) in enumerate(zip(group.branches, group.parents, strict=True)):
            way = (number, index) if parent is None else (*ways[parent], index)
            first = group.prompt if parent is None else ends[parent]
            spans += [(way, first + place) for place in range(length)]
            ways.append(way)
            ends.append(first + length)

    def sees(query: tuple[tuple[int, ...], int], key: tuple[tuple[int, ...], int]) -> bool:
        near = 0 <= query[1] - key[1] < (window or 10**9)
        spans = groups[query[0][0]].mutual if query[0] == key[0] and len(key[0]) == 1 else ()
        return query[0][: len(key[0])] == key[0] and (
            near
            or any(
                span.begin <= query[1] < key[1] < span.end and (span.everywhere or window is not None) for span in spans
            )
        )

    mask = torch.tensor([[sees(query, key) for key in spans + carried] for query in spans], dtype=torch.bool)
    mask = mask.view(len(spans), len(spans + carried))  # where there is no query as well
    if cap is None and sinks_H is None:
        return scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * 0.3
    scores = (scores if cap is None else cap * torch.tanh(scores / cap)).masked_fill(~mask, -torch.inf)
    sinks = torch.full((query.shape[1],), -torch.inf, dtype=query.dtype) if sinks_H is None else sinks_H
    weights = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1).softmax(-1)
    return weights[..., :-1] @ value


def random_tree(rng: random.Random) -> Group:
    """A prompt and the tree of its responses, in depth-first order; the prompt may be carried."""
    way: list[int] = []
    parents: list[int | None] = []
    for number in range(rng.randint(0, 7)):
        del way[rng.randint(0, len(way)) :]
        parents.append(way[-1] if way else None)
        way.append(number)
    branches = tuple(rng.randint(0, 12) for _ in parents)
    if rng.random() < 0.3:
        parents = [None] * len(parents)
    prompt, mutual = rng.randint(1, 15), list[MutualSpan]()
    while rng.random() < 0.5 and (begin := mutual[-1].end if mutual else rng.randint(0, 4)) < prompt:
        mutual.append(MutualSpan(begin, rng.randint(begin + 1, prompt), rng.random() < 0.5))
    return Group(prompt, branches, tuple(parents), rng.random() < 0.4, tuple(mutual))


@pytest.mark.parametrize("masked_rows", [4, 512])
@pytest.mark.parametrize("seed", table_rows(range(20), range(4)))
def test_pieces_together_are_one_softmax_over_what_each_token_may_see(
    seed: int, masked_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_layout, "MASKED_ROWS", masked_rows)
    rng = random.Random(seed)
    groups = [random_tree(rng) for _ in range(rng.randint(1, 3))]
    num_carried = sum(group.prompt for group in groups if group.carried)
    start = sum(group.prompt + sum(group.branches) for group in groups) - num_carried
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, 4, start, 8), (1, 2, start + num_carried, 8), (1, 2, start + num_carried, 8)]
    ours = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    ours.append(torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_())
    theirs.append(ours[3].detach().clone().requires_grad_())
    kinds = [(None, False), (1.5, False), (None, True), (1.5, True)]  # caps, and sinks
    for window, (cap, sinks) in itertools.product((None, 1, 2, 5, 11, 100), kinds):
        pieces = attention_pieces(stretches_of(groups), window)
        actual, expected = (
            piecewise_attention(ours[0], ours[1], ours[2], pieces, 0.3, cap, ours[3] if sinks else None),
            dense_attention(theirs[0], theirs[1], theirs[2], groups, window, cap, theirs[3] if sinks else None),
        )
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        upstream = torch.randn(actual.shape, generator=generator, dtype=torch.float64)
        actual_grads, expected_grads = (
            torch.autograd.grad(out, tensors[: 3 + sinks], upstream)
            for out, tensors in ((actual, ours), (expected, theirs))
        )
        torch.testing.assert_close(actual_grads, expected_grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("window", "cap"),
    table_rows(itertools.product([None, 1, 5, 100], [None, 1.5]), [(5, 1.5), (100, None)]),
)
def test_the_attention_of_gpus_is_the_same_softmax(window: int | None, cap: float | None) -> None:
    everywhere = cap is None
    groups = [
        flat(7, 4, 0, 9)._replace(mutual=(MutualSpan(0, 3, everywhere), MutualSpan(3, 6, everywhere))),
        flat(6, 1, 2, carried=True),
        flat(3),
        Group(1, (5, 100, 60, 25, 15), parents=(None, None, 1, 2, 1)),
    ]
    generator = torch.Generator().manual_seed(0)
    num_tokens = 20 + 3 + 3 + 206
    shapes = [(1, 4, num_tokens, 16), (1, 2, num_tokens + 6, 16), (1, 2, num_tokens + 6, 16)]
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    stretches = stretches_of(groups)
    mask = prefix_block_mask(key_labels(stretches), window, num_tokens, sees_ahead(stretches, window))
    for sinks_H in (None, torch.randn(4, generator=generator)):
        actual = flex_prefix_attention(query, key, value, mask, 0.3, cap, sinks_H)  # it has no backward pass on a CPU
        expected = dense_attention(query, key, value, groups, window, cap, sinks_H)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_a_short_row_is_filled_up_to_two_blocks_which_nobody_sees() -> None:
    groups = [flat(4, 3, 2), flat(5, 2, carried=True)]
    query, key, value = torch.randn(1, 2, 11, 16), torch.randn(1, 2, 16, 16), torch.randn(1, 2, 16, 16)
    mask = prefix_block_mask(key_labels(stretches_of(groups)), None, 11)
    assert mask.seq_lengths == (129, 129) and mask.kv_num_blocks.shape[-1] == 2
    actual = flex_prefix_attention(query, key, value, mask, 0.3)
    torch.testing.assert_close(actual, dense_attention(query, key, value, groups, None), rtol=0, atol=1e-5)


def test_the_pieces_of_a_group_repeat_no_key_and_pad_no_query() -> None:
    stretches = stretches_of([flat(4, 2, 0, 3)])
    pieces = [(piece.queries, piece.keys, piece.causal, piece.merges) for piece in attention_pieces(stretches, None)]
    prompt, first, second = slice(0, 4), slice(4, 6), slice(6, 9)
    assert pieces == [
        (prompt, prompt, True, False),
        (first, first, True, False),
        (second, second, True, False),
        (slice(4, 9), prompt, False, True),
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_these_families_are_taken(name: str) -> None:
    model = family(name)
    before = model.config._attn_implementation
    assert prefix_refusal(model) is None
    assert model.training and model.config._attn_implementation == before


def test_a_model_that_cannot_share_a_prefix_says_why() -> None:
    assert prefix_refusal(small_model("llama4_text")) == "its attention is cut into chunks"


def test_gradient_checkpointing_outside_of_the_switch_is_refused_rather_than_wrong() -> None:
    model = family("qwen3")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    micro_batch = make_micro_batch(ragged_rollouts(), [0.0] * 10)
    with pytest.raises(RuntimeError, match="put both passes into `with shared_prefixes"):
        micro_batch_logprobs(model, micro_batch, 1.0)
    with torch.no_grad():
        micro_batch_logprobs(model, micro_batch, 1.0)


def test_the_prompt_goes_through_the_model_once() -> None:
    model, seen = random_policy(), []
    logit_map(model)
    model.get_decoder().register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    rollouts = [make_rollout([3] * 20, [4, 5, 6], sample_id=sample) for sample in range(8)]
    micro_batch_logprobs(model, make_micro_batch(rollouts, [0.0] * 8), 1.0)
    assert seen == [(1, 20 + 8 * 2)]


def test_bfloat16_is_as_close_to_the_truth_as_the_plain_path() -> None:
    rollouts, model = ragged_rollouts(), family("qwen3").eval()
    exact, _ = micro_batch_logprobs(model.double(), make_micro_batch(rollouts, [0.0] * 10, False), 1.0)
    model.bfloat16()
    plain_N, _ = micro_batch_logprobs(model, make_micro_batch(rollouts, [0.0] * 10, False), 1.0)
    ours_N, _ = micro_batch_logprobs(model, make_micro_batch(rollouts, [0.0] * 10), 1.0)
    assert relative_error(ours_N.double(), exact) < 1.5 * relative_error(plain_N.double(), exact)


# ---- selective checkpointing -----------------------------------------------------------------------------


def test_selective_checkpointing_keeps_what_flex_attention_gives() -> None:
    mask = prefix_block_mask(key_labels(stretches_of([flat(3, 2, 3)])), None, 8)
    query = torch.randn(1, 2, 8, 16)
    with KeptBytes() as kept:
        flex_prefix_attention(query, query, query, mask, 0.25)
    assert kept.num_bytes >= query.nbytes


@pytest.mark.nightly
def test_what_is_compiled_as_flex_attention_is_runs_once_forward_under_selective_checkpointing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FlexAttention has no backward pass on a CPU, so another attention is compiled in its place."""

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.softmax(query @ key.transpose(-1, -2), -1) @ value

    class CountsCompiled(KeptBytes):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += func is inductor_compiled_code
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(flex, "flex_attention", attention)
    attend = cast(Any, flex._compiled.__wrapped__())
    calls, gradients = [], []
    for kept in ([torch.ops.aten.mm.default], KEPT):
        torch.manual_seed(0)
        hidden = torch.randn(1, 2, 8, 16, requires_grad=True)
        with CountsCompiled() as counter:
            contexts = partial(create_selective_checkpoint_contexts, kept)
            layer = lambda x: torch.tanh(attend(x * 2, x * 3, x.sin()))  # noqa: E731
            checkpoint(layer, hidden, use_reentrant=False, context_fn=contexts).square().sum().backward()
        calls.append(counter.calls)
        gradients.append(hidden.grad)
    assert calls == [3, 2]  # the last is the backward pass
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
