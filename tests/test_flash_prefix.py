"""Attention over a shared prompt by torch's kernels, beside one softmax over a row and beside single rollouts.

The kernels are plain operations here (``doubles/flash_kernels.py``), which take float32 and float64 as well, so that
layout, merge and gradient are held to rounding errors. Nothing here runs torch's own kernels, which need a GPU.
"""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import peft  # noqa: F401  # it asks for CUDA when it is imported first under the pretended GPU
import pytest
import torch
from conftest import table_rows
from hand_made import relative_error
from test_shared_prefix import (
    FAMILIES,
    Group,
    dense_attention,
    family,
    flat,
    gradients,
    plain,
    ragged_rollouts,
    random_tree,
    stretches_of,
    upstream,
    with_lora,
)
from torch.utils._python_dispatch import _disable_current_modes

from lit_grpo.update.batches.microbatch import make_micro_batches
from lit_grpo.update.logprobs.checkpointing import checkpoint_layers
from lit_grpo.update.logprobs.forward import micro_batch_logprobs
from lit_grpo.update.prefix import kernels
from lit_grpo.update.prefix.flash import fused_attention, fused_kernels, plan_launches
from lit_grpo.update.prefix.kernels import KERNELS, Kernels
from lit_grpo.update.prefix.sharing import shared_prefixes
from lit_grpo.update.prefix.support import prefix_refusal
from tests.doubles import flash_kernels
from tests.doubles.pretend_cuda import Ledger, pretend_cuda

Inputs = list[torch.Tensor]


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> list[Kernels]:
    """Kernels in plain operations, on the CPU."""
    names = ("_efficient_attention_forward", "_efficient_attention_backward")
    ours = (flash_kernels.efficient_forward, flash_kernels.efficient_backward)
    monkeypatch.setattr(kernels, "_aten", SimpleNamespace(**dict(zip(names, ours, strict=True))))
    return [KERNELS[0]._replace(forward=flash_kernels.forward, backward=flash_kernels.backward), KERNELS[1]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    """A pretended GPU whose flash kernels take every dtype."""
    with pretend_cuda() as ledger:
        monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda _: True)
        yield ledger


@pytest.fixture
def gpu_as_it_is() -> Iterator[Ledger]:
    """A pretended GPU, on which float32 goes by the memory-efficient kernels."""
    with pretend_cuda() as ledger:
        yield ledger


# ---- one row ---------------------------------------------------------------------------------------------


def random_inputs(groups: list[Group], seed: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """Queries of four heads, keys and values of two, and sinks."""
    carried = sum(group.prompt for group in groups if group.carried)
    num_keys = sum(group.prompt + sum(group.branches) for group in groups)
    shapes = [(1, 4, num_keys - carried, 8), *2 * [(1, 2, num_keys, 8)], (4,)]
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randn(each, generator=numbers, dtype=dtype).requires_grad_() for each in shapes]


@pytest.mark.parametrize("kind", range(2))
@pytest.mark.parametrize("seed", table_rows(range(20), range(5)))
def test_launches_together_are_one_softmax_over_what_each_token_may_see(
    seed: int, kind: int, plain_kernels: list[Kernels]
) -> None:
    rng = random.Random(seed)
    groups = [flat(3), *(random_tree(rng)._replace(mutual=()) for _ in range(rng.randint(1, 4)))]
    ours, theirs = random_inputs(groups, seed), random_inputs(groups, seed)
    for window, sinks in itertools.product((None, 1, 5, 100), (False, True)):
        plan = plan_launches(tuple(stretches_of(groups)), window)
        of_heads = ours[3] if sinks else None
        actual = fused_attention(ours[0], ours[1], ours[2], plan, 0.3, of_heads, plain_kernels[kind])
        expected = dense_attention(theirs[0], theirs[1], theirs[2], groups, window, None, theirs[3] if sinks else None)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        above = torch.sin(torch.arange(actual.numel(), dtype=torch.float64)).view_as(actual)
        grads, exact = (
            torch.autograd.grad(output, each[: 3 + sinks], above)
            for output, each in ((actual, ours), (expected, theirs))
        )
        torch.testing.assert_close(grads, exact, rtol=0, atol=1e-12)


def test_a_group_takes_two_launches_and_a_tree_one_more_for_each_level() -> None:
    several = [flat(4, 2, 0, 3), flat(5, 1), flat(2, 7, 7)]
    tree, carried = Group(5, (2, 3, 4, 1), (None, 0, 0, 1)), flat(6, 3, 4, carried=True)
    numbers = [len(plan_launches(tuple(stretches_of(groups))).launches) for groups in (several, [tree], [carried])]
    assert numbers == [2, 4, 2]
    assert len(plan_launches(tuple(stretches_of([tree, *several])), 3).launches) == 1
    plan = plan_launches(tuple(stretches_of([flat(4, 2, 0, 3), flat(5, 1)])))
    own, before = plan.launches
    assert own.causal and not before.causal and (own.keys, before.keys) == (slice(0, 15), slice(0, 14))
    starts = [each.T.tolist() for each in plan.tensors["starts"].split([own.num_starts, before.num_starts], 1)]
    assert starts[0] == [[0, 0], [4, 4], [6, 6], [9, 9], [14, 14], [15, 15]]
    # queries of the first prompt, responses to it, keys of these, queries of the second prompt, the response to it
    assert starts[1] == [[0, 0], [4, 0], [9, 4], [14, 4], [14, 9], [15, 14]]
    assert (own.longest, before.longest) == ((5, 5), (5, 5))


def test_bfloat16_is_about_as_close_to_the_truth_as_one_softmax(plain_kernels: list[Kernels]) -> None:
    groups = [flat(40, *range(20, 40)), flat(9, 30, carried=True)]
    exact, ours, theirs = (random_inputs(groups, 0) for _ in range(3))
    plan, found = plan_launches(tuple(stretches_of(groups))), list[tuple[torch.Tensor, ...]]()
    for inputs, dtype in ((exact, torch.float64), (ours, torch.bfloat16), (theirs, torch.bfloat16)):
        query, key, value = (each.bfloat16().to(dtype) for each in inputs[:3])
        if inputs is ours:
            output = fused_attention(query, key, value, plan, 0.3, None, plain_kernels[0])
        else:
            output = dense_attention(query, key, value, groups, None)
        above = torch.sin(torch.arange(output.numel(), dtype=torch.float64)).view_as(output).to(dtype)
        found.append((output, *torch.autograd.grad(output, inputs[:3], above)))
    for truth, one, other in zip(*found, strict=True):
        assert relative_error(one.detach().double(), truth) < 1.5 * relative_error(other.double(), truth)


# ---- models, on the pretended GPU ------------------------------------------------------------------------


def check_on_gpu(model: Any, max_tokens: int = 10_000) -> Counter[str]:
    """Compare with single rollouts on the CPU; return how often each kernel ran."""
    rollouts, called = ragged_rollouts(), Counter[str]()
    with _disable_current_modes():
        expected, gradient = plain(model, rollouts)
    there = copy.deepcopy(model).to("cuda")
    there.zero_grad()

    def counted(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called[name] += 1
            return kernel(*args, **kwargs)

        return call

    assert prefix_refusal(there) is None  # and attention has had its trial
    with pytest.MonkeyPatch.context() as patch, shared_prefixes(there):
        for name in ("forward", "backward", "efficient_forward", "efficient_backward"):
            patch.setattr(flash_kernels, name, counted(name, getattr(flash_kernels, name)))
        for micro_batch in make_micro_batches(rollouts, max_tokens):
            members = [rollouts[row] for row in micro_batch.rows]
            logprobs_N, _ = micro_batch_logprobs(there, micro_batch.to("cuda"), 1.0)
            expected_N = torch.cat([expected[id(rollout)] for rollout in members])
            assert relative_error(logprobs_N.detach().cpu(), expected_N) < 4e-6
            (logprobs_N * torch.cat([*map(upstream, members)]).to("cuda")).sum().backward()
    assert relative_error(gradients(there).cpu(), gradient) < 4e-6
    return called


BY_FLASH = [name for name in FAMILIES if name not in ("gemma2-capped", "mamba")]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", BY_FLASH)
def test_log_probs_and_gradients_are_those_of_single_rollouts(name: str) -> None:
    model = family(name)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * 3
    windows = sum(kind == "sliding_attention" for kind in kinds) if name != "mistral-sliding" else 3
    full = 3 - windows - sum(kind in ("linear_attention", "conv") for kind in kinds)
    assert check_on_gpu(model) == {"forward": windows + 2 * full, "backward": windows + 2 * full}


@pytest.mark.usefixtures("gpu_as_it_is")
@pytest.mark.parametrize("name", table_rows(BY_FLASH, ["qwen3", "gemma3-mixed"]))
def test_and_in_float32_by_the_memory_efficient_kernels(name: str) -> None:
    called = check_on_gpu(family(name))
    assert called["forward"] == called["efficient_forward"] and called["backward"] == called["efficient_backward"] > 0


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("max_tokens", table_rows([10_000, 49], [49]))
@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
@pytest.mark.parametrize("name", table_rows(["qwen3", "gemma3-mixed", "gpt-oss-sinks"], ["qwen3"]))
def test_and_with_lora_checkpointing_and_split_groups(name: str, checkpointing: Any, max_tokens: int) -> None:
    model = family(name)
    checkpoint_layers(model, checkpointing)
    called = check_on_gpu(with_lora(model), max_tokens)
    if max_tokens == 10_000:  # kept ones do not run again
        assert called["forward"] == called["backward"] * (2 if checkpointing is True else 1)


# ---- where flash kernels cannot be taken -----------------------------------------------------------------


def asked(
    dtype: torch.dtype = torch.bfloat16, size: int = 16, cap: float | None = None, ahead: bool = False
) -> str | None:
    """Return the name of the kernels that attend on the pretended GPU."""
    query = torch.empty((1, 4, 5, size), dtype=dtype, device="cuda")
    found = fused_kernels(query, query[:, :2], cap, ahead)
    return None if found is None else found.name


def test_each_dtype_and_size_goes_by_the_first_kernels_that_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_cuda(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [asked(), asked(torch.float16), asked(size=256)] == 3 * ["flash"]
        assert [asked(torch.float32), asked(torch.float32, 20), asked(size=264)] == 3 * ["memory-efficient"]
    with pretend_cuda():
        monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda _: False)  # below sm_80
        assert asked(torch.float16) == "memory-efficient"


_SIZE = r"do not take heads of {} numbers in torch.{} on this device"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"size": 20}, ", ".join(f"the {kind.name} ones {_SIZE.format(20, 'bfloat16')}" for kind in KERNELS)),
        ({"size": 18, "dtype": torch.float32}, f"the memory-efficient ones {_SIZE.format(18, 'float32')}"),
        ({"cap": 30.0}, "without torch's kernels: their scores have no cap"),
        ({"ahead": True}, "without torch's kernels: their tokens see none ahead"),
    ],
)
def test_what_they_do_not_take_is_compiled_and_a_line_says_so_once(arguments: Any, why: str) -> None:
    with pretend_cuda(), pytest.warns(UserWarning, match=rf"The update compiles its attention.*{why}\.$") as said:
        assert asked(**arguments) is asked(**arguments) is None
    assert len(said) == 1


def off(*results: Any) -> Any:
    """Results whose log-sum-exp is a little off."""
    return results[0], results[1] + 0.1, *results[2:]


@pytest.mark.parametrize("broken", ["forward", "backward"])  # by which the memory-efficient ones compute here too
@pytest.mark.parametrize("wrong", [True, False])
def test_kernels_that_fail_or_compute_something_else_are_left(
    broken: str, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = getattr(flash_kernels, broken)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not wrong:
            raise RuntimeError("this build has no such kernel")
        return off(*own(*args, **kwargs))

    monkeypatch.setattr(flash_kernels, broken, kernel)
    policy: Any = family("qwen3").bfloat16()
    with pretend_cuda():
        why = r"are \d+\.\d% off" if wrong else "fail .this build has no such kernel."
        match = f"the flash ones {why}, the memory-efficient ones {why}"
        with pytest.warns(UserWarning, match=match):
            assert prefix_refusal(policy.to("cuda")) is None  # FlexAttention takes it


def test_where_one_kind_fails_the_next_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    own = flash_kernels.forward

    def forward(*args: Any, **more: Any) -> Any:
        return own(*args, **more) if more.get("multiple") == 4 else off(*own(*args, **more))

    monkeypatch.setattr(flash_kernels, "forward", forward)
    with pretend_cuda():
        assert asked() == "memory-efficient"


def test_a_device_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = RuntimeError("CUDA error: an illegal memory access was encountered")

    def fail(*_: Any, **__: Any) -> Any:
        raise failure

    monkeypatch.setattr(flash_kernels, "backward", fail)
    with pretend_cuda(), pytest.raises(RuntimeError) as raised:
        asked()
    assert raised.value is failure


def test_torch_takes_these_arguments_and_returns_these_shapes() -> None:
    """By its own description of the operations, on a device without numbers; one of the four is wrong in torch 2.13."""
    groups = [flat(4, 2, 0, 3), flat(5, 1), flat(6, 2, carried=True)]
    for window, kind in itertools.product((None, 3), KERNELS):
        inputs = [each.detach().to("meta", torch.bfloat16).requires_grad_() for each in random_inputs(groups, 0)[:3]]
        plan = plan_launches(tuple(stretches_of(groups)), window).to(torch.device("meta"), {})
        output = fused_attention(inputs[0], inputs[1], inputs[2], plan, 0.3, None, kind)
        assert output.shape == inputs[0].shape and output.dtype == torch.bfloat16
        if kind is KERNELS[1]:  # torch forgets the argument ``out`` of its backward operation
            continue
        grads = torch.autograd.grad(output, inputs, torch.empty_like(output))
        assert [each.shape for each in grads] == [each.shape for each in inputs]
