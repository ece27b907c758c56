"""Attention of packed rows by torch's own kernels: a GPU's way, for which nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from lit_grpo.memory import in_one_copy
from lit_grpo.policy.architecture.decoder import RUN_FAILURES, raise_device_failure
from lit_grpo.process.terminal import first_line
from lit_grpo.ranks import Ranks
from lit_grpo.update.prefix.kernels import KERNELS, Kernels
from lit_grpo.update.prefix.layout import Piece, Stretch, attention_pieces, piecewise_attention
from lit_grpo.update.prefix.recurrent import parents_of

_TOLERANCES = {torch.float32: 1e-4}  # of the norm of output or gradient; in 16 bits 0.03
_TRIAL = (  # two prompts, one of them carried, and a tree
    *(Stretch(0, 0, 150, last=2), Stretch(150, 150, 140, last=1), Stretch(290, 150, 1, last=2)),
    *(Stretch(350, 0, 20, last=6, carried=True), Stretch(291, 20, 30, last=6)),
    *(Stretch(321, 50, 3, last=5), Stretch(324, 50, 26, last=6)),
)


class Launch(NamedTuple):
    """All queries of a row and some of the keys, sequence by sequence; a sequence may lack either.

    Args:
        keys: A part of the row's keys and the carried ones; None with a window, where the plan has copies of keys.
        num_starts: Number of sequences, and one more.
        longest: Number of queries and of keys of the longest sequences. Of queries 2 at least: told of a single one,
            kernels for fewer KV heads than query heads take sequences for queries.
        causal: Whether the last query of a sequence sees all its keys, the one before it all but one, and so on; else
            every query sees every key.
        back: How many keys before its own a query sees, with a window.
    """

    keys: slice | None
    num_starts: int
    longest: tuple[int, int]
    causal: bool
    back: int | None


class Plan(NamedTuple):
    """The launches of a row, in the first of which every query sees its own key; and their tensors.

    These are ``starts`` (2, num_starts of all), int32: where each sequence begins among the queries and among the
    launch's keys, and where the last one ends. With a window also ``keys``: the place of each, some several times.
    """

    launches: Sequence[Launch]
    tensors: Mapping[str, torch.Tensor]

    def to(self, device: torch.device, there: Mapping[str, torch.Tensor]) -> Plan:
        """Return the plan with its tensors on a device; ``starts`` without a window may be ``there`` already."""
        has_them = self.tensors.keys() == {"starts"} <= there.keys()
        return self._replace(tensors=there if has_them else in_one_copy(self.tensors, device))

    def each(self) -> Iterator[tuple[Launch, Any, torch.Tensor]]:
        """Give each launch with its keys and its starts."""
        parts = self.tensors["starts"].split([launch.num_starts for launch in self.launches], 1)
        for launch, starts_2S in zip(self.launches, parts, strict=True):
            yield launch, self.tensors["keys"] if launch.keys is None else launch.keys, starts_2S


@lru_cache(maxsize=16)
def plan_launches(stretches: tuple[Stretch, ...], window: int | None = None) -> Plan:
    """Plan the attention of a packed row as few launches that together see each key once; tensors are on the host.

    In the first one each stretch attends to itself. In another one all that come after a prompt attend to it; a tree
    takes one more for each of its levels, and carried prompts take one. Where a window hides something, there is one
    launch: the keys that a stretch still sees of those before it are copied in front of its own.

    Args:
        stretches: Stretches of the packed row, in order.
        window: How many tokens back a query sees, its own among them; ``None`` for all.
    """
    launches, starts, tensors = list[Launch](), list[torch.Tensor](), dict[str, torch.Tensor]()

    def add(ends: Sequence[tuple[int, int]], keys: slice | None, causal: bool, back: int | None = None) -> None:
        """Without sequences that have neither queries nor keys."""
        starts.append(torch.tensor(list(dict.fromkeys(ends)), dtype=torch.int32, device="cpu").T)
        queries, most_keys = starts[-1].diff().amax(1).tolist()
        launches.append(Launch(keys, starts[-1].shape[1], (max(queries, 2), most_keys), causal, back))

    if window is not None and max(each.first + each.length for each in stretches) > window:
        seen, ends, places = list[torch.Tensor](), [(0, 0)], list[torch.Tensor]()
        for own, parent in zip(stretches, parents_of(stretches), strict=True):
            keys = torch.arange(own.start, own.start + own.length, device="cpu")
            before = keys[:0] if parent is None else seen[parent]
            seen.append(torch.cat([before[max(0, len(before) - window + 1) :], keys]))
            if own.length and not own.carried:
                places.append(seen[-1])
                ends.append((own.start + own.length, ends[-1][1] + len(seen[-1])))
        tensors["keys"] = torch.cat(places)
        add(ends, None, True, window - 1)
    else:
        groups = list[list[Piece]]()
        for piece in attention_pieces(stretches, None):
            for group in groups:
                after = group[-1].queries.stop <= piece.queries.start and group[-1].keys.stop <= piece.keys.start
                if after and group[-1].causal == piece.causal:
                    group.append(piece)
                    break
            else:
                groups.append([piece])
        for group in groups:
            first, ends = group[0].keys.start, [(0, 0)]
            for piece in group:  # before it, queries that see no key here, and keys that no query sees
                ends += [(piece.queries.start, ends[-1][1]), (piece.queries.start, piece.keys.start - first)]
                ends.append((piece.queries.stop, piece.keys.stop - first))
            ends.append((sum(each.length for each in stretches if not each.carried), ends[-1][1]))
            add(ends, slice(first, group[-1].keys.stop), group[0].causal)
    return Plan(launches, tensors | {"starts": torch.cat(starts, 1)})


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: Plan,
    scaling: float,
    sinks_H: Any = None,
    kernels: Kernels = KERNELS[0],
) -> torch.Tensor:
    """Attend launch by launch, and merge the results as :func:`lit_grpo.update.prefix.layout.piecewise_attention` does.

    Args:
        query: Shape (1, heads, T, head size), in a dtype of the kernels; the result has the same.
        key: Shape (1, KV heads, T, head size); fewer KV heads than query heads are shared, not repeated.
        value: Values, of the shape of ``key``.
        plan: Which queries see which keys, on their device.
        scaling: Scores are multiplied by it.
        sinks_H: The score of each head's sink, or None.
        kernels: What computes each launch.
    """
    rows = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    rows_THS = [each if each.stride(-1) == 1 else each.contiguous() for each in rows]
    output_THS: Any = _FusedAttention.apply(*rows_THS, plan, scaling, sinks_H, kernels)
    return output_THS.transpose(0, 1).unsqueeze(0)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, plan: Plan, scaling: float, sinks_H: Any, kernels: Kernels
    ) -> torch.Tensor:
        output, logsumexp_HT = query, query
        for number, (launch, keys, starts_2S) in enumerate(plan.each()):
            some, log_sum_HT, *_ = kernels.forward(
                query, key[keys], value[keys], *starts_2S, *launch.longest, 0.0, launch.causal, False,
                scale=scaling, window_size_left=launch.back,
            )  # fmt: skip
            if not number:
                output, logsumexp_HT = some, log_sum_HT
                continue
            log_sum_HT = log_sum_HT.nan_to_num(torch.nan, -torch.inf, -torch.inf)  # of no key it is positive infinity
            share_TH1 = torch.sigmoid(log_sum_HT - logsumexp_HT).T[..., None]
            kept = output * (1 - share_TH1)  # in float32, and so is the sum before it is rounded
            output = torch.addcmul(kept, some, share_TH1, out=torch.empty_like(output))
            logsumexp_HT = torch.logaddexp(logsumexp_HT, log_sum_HT)
        if sinks_H is not None:
            joint_HT = torch.logaddexp(logsumexp_HT, sinks_H.to(logsumexp_HT.dtype)[:, None])
            output = output * (logsumexp_HT - joint_HT).exp().T[..., None].to(output.dtype)
            logsumexp_HT = joint_HT
        ctx.save_for_backward(query, key, value, output, logsumexp_HT, sinks_H)
        ctx.plan, ctx.scaling, ctx.kernels = plan, scaling, kernels
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, logsumexp_HT, sinks_H = ctx.saved_tensors
        no_dropout = torch.empty(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
        totals, sinks_grad = list[torch.Tensor](), None
        for launch, keys, starts_2S in ctx.plan.each():
            query_part, *parts = ctx.kernels.backward(
                gradients[0], query, key[keys], value[keys], output, logsumexp_HT, *starts_2S, *launch.longest,
                0.0, launch.causal, *no_dropout, scale=ctx.scaling, window_size_left=launch.back,
            )  # fmt: skip
            if launch.keys is None:  # a key has been copied to many sequences
                sums = [torch.zeros(key.shape, dtype=logsumexp_HT.dtype, device=key.device) for _ in parts]
                added = (one.index_add_(0, keys, part.to(one.dtype)) for one, part in zip(sums, parts, strict=True))
                totals = [query_part, *(each.to(key.dtype) for each in added)]
            elif not totals:  # all keys but the carried ones
                missing = len(key) - launch.keys.stop
                totals = [query_part, *(pad(part, (0, 0, 0, 0, 0, missing)) if missing else part for part in parts)]
            else:
                totals[0].add_(query_part)
                for total, part in zip(totals[1:], parts, strict=True):
                    total[keys].add_(part)
        if sinks_H is not None:
            shares_HT = (sinks_H.to(logsumexp_HT.dtype)[:, None] - logsumexp_HT).exp()
            sinks_grad = -(shares_HT * (gradients[0] * output).sum(-1).T).sum(1).to(sinks_H.dtype)
        return *totals, None, None, sinks_grad, None


def fused_kernels(query: torch.Tensor, key: torch.Tensor, cap: float | None, ahead: bool = False) -> Kernels | None:
    """Return which of torch's kernels attend here; where none does, a line says once why attention is compiled.

    None does where tokens of an image see those ``ahead``.
    """
    lacks = "their scores have no cap" if cap is not None else "their tokens see none ahead" if ahead else ""
    return _chosen(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[-1], lacks)


@cache
def _chosen(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int, lacks: str
) -> Kernels | None:
    """Return the first kernels that torch says can run here, and that a trial beside the CPU's way finds right.

    If all lack what is needed, ``lacks`` says what that is.
    """
    refusals = [lacks] if lacks else []
    for kernels in () if lacks else KERNELS:
        why = _refusal(kernels, device, dtype, heads, kv_heads, size)
        if not why:
            return kernels
        refusals.append(f"the {kernels.name} ones {why}")
    Ranks().warn(f"The update compiles its attention, half a minute, without torch's kernels: {', '.join(refusals)}.")
    return None


def _refusal(kernels: Kernels, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> str:
    """Say why kernels cannot attend."""
    like = torch.empty((1, heads, 2, size), dtype=dtype, device=device, requires_grad=True)
    if not kernels.takes(torch.backends.cuda.SDPAParams(like, like, like, None, 0.0, False, False)):
        return f"do not take heads of {size} numbers in {dtype} on this device"
    try:  # in a thread, for which nothing is kept or counted that runs within a layer
        with ThreadPoolExecutor(1) as apart:
            off = apart.submit(_trial, kernels, device, dtype, heads, kv_heads, size).result()
        return "" if off < _TOLERANCES.get(dtype, 0.03) else f"are {off:.1%} off"
    except RUN_FAILURES as failure:
        raise_device_failure(failure)
        return f"fail ({first_line(failure)})"


def _trial(kernels: Kernels, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> float:
    """Return the largest relative error of outputs and gradients, beside the CPU's way in float32."""
    num_tokens, num_keys = _TRIAL[3].start, _TRIAL[3].start + _TRIAL[3].length
    shapes = [(1, heads, num_tokens, size), *2 * [(1, kv_heads, num_keys, size)], (1, heads, num_tokens, size)]
    random, errors = torch.Generator("cpu").manual_seed(0), list[float]()
    here = [torch.randn(shape, generator=random, device="cpu").to(dtype) for shape in shapes]
    for window in (None, 16):
        there = [each.to(device).requires_grad_() for each in here]
        exact = [each.float().requires_grad_() for each in here]
        plan = plan_launches(_TRIAL, window).to(device, {})
        actual = fused_attention(there[0], there[1], there[2], plan, size**-0.5, None, kernels)
        expected = piecewise_attention(exact[0], exact[1], exact[2], attention_pieces(_TRIAL, window), size**-0.5)
        found = actual, *torch.autograd.grad(actual, there[:3], there[3])
        wanted = expected, *torch.autograd.grad(expected, exact[:3], exact[3])
        for one, other in zip(found, wanted, strict=True):
            errors.append(float(((one.cpu().float() - other).norm() / other.norm()).detach()))
    return max(errors)
