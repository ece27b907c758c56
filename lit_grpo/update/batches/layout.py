"""Rollouts laid out as the tensors that go through the policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from lit_grpo.memory import in_one_copy
from lit_grpo.plugins.columns import OF_CANDIDATES
from lit_grpo.policy.architecture.vision import Placed, with_images
from lit_grpo.trajectory import OBSERVED, prefix_tree
from lit_grpo.types import MutualSpan, Pictures, Rollout
from lit_grpo.update.objective.tokens import Tokens
from lit_grpo.update.plugin import Chunk
from lit_grpo.update.prefix.carried import CarriedSpan
from lit_grpo.update.prefix.flash import plan_launches
from lit_grpo.update.prefix.layout import Stretch, key_labels

LEAST_SHARED = 32
"""Tokens that completions of a prompt have to begin with in common to share them: fewer are not worth a call."""


class Member(NamedTuple):
    """A completion of a row, or the chunk of it that is there.

    Args:
        row: Place of the completion among the rollouts of the step.
        begin: Place of its first token that is in the row.
        end: Place after its last.
        trained: Which of its tokens that are trained on are in the row; None if it is there for the channel ``ce``.
        num_trained: Number of its tokens that are trained on, wherever they are.
    """

    row: int
    begin: int
    end: int
    trained: slice | None
    num_trained: int


@dataclass
class PackedRow(Tokens):
    """A micro-batch: one row without padding, and the columns that its tokens are trained on.

    A prompt stands in it once, with its responses after it, each of which counts its positions from the prompt's end.
    Tokens that several responses begin with stand there once too, wherever they come from: a tree of rollouts, or equal
    completions. For models that cannot share a prefix there are no stretches: each completion has a row of its own
    after its prompt, padded on the right (under causal attention padding on the right is never seen, so there is no
    attention mask, and no pad id can be mistaken for a token).

    The completion tokens that are trained on, one completion after another, are the N axis; all others (observed ones)
    stand in the row and nowhere else, so that no sum, mean or ratio can meet them. Tokens with a weight in the channel
    ``ce`` are the M axis, observed tokens among them. Beside the columns of :class:`Tokens` there are

    - ``source`` (N): where in the flattened (B, T) the *predecessor* of each token stands, whose hidden state predicts
      it; that of a response's first token is the prompt's last. The last tokens of carried spans count as standing
      after the row, one after another. ``target_id`` (N): its id. ``ce_source`` and ``ce_target_id`` (M): the same.
    - ``unique`` (U) and ``inverse``, where completions share tokens: the places, on the N axis with the M axis after
      it, of one of each that are the same, and which of them each token is. Log-probs are computed of these alone.
    - ``labels`` and ``starts``, on a device other than the host: see
      :func:`lit_grpo.update.prefix.layout.key_labels` and :func:`lit_grpo.update.prefix.flash.plan_launches`.

    Args:
        input_ids_BT: Token ids of the row, shape (1, T); several rows if no prefix is shared.
        position_ids_BT: Position of each token in its own sequence, shape as ``input_ids_BT``; (3, 1, T) where a
            prompt has images and a policy has positions in time, height and width.
        stretches: What is where, and which tokens see which.
        carried: What the row sees of other micro-batches, a span for each stretch that is.
        in_row: What others have seen of it, with its place.
        pictures: The images of its prompts and observations, in order.
        chunk: The chunk of a completion that the row is; it then has no other.
        weight: What its tokens count: 1, or the chunk's weight; 0 if the row is a token that stands for nothing.
        members: Completions in the row, in the order of the N axis.
        tokens_2T: Sources and ids of all of their tokens, on the host.

    Example:
        The prompt [5, 6] with the completions [7, 8] and [9, 4, 3]::

            input_ids_BT    = [[5, 6, 7, 9, 4]]
            position_ids_BT = [[0, 1, 2, 2, 3]]
            stretches = (Stretch(0, 0, 2, last=2), Stretch(2, 2, 1, last=1), Stretch(3, 2, 2, last=2))
            source = [1, 2, 1, 3, 4]    target_id = [7, 8, 9, 4, 3]    length = [2, 3]
    """

    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    stretches: tuple[Stretch, ...] = ()
    carried: tuple[CarriedSpan, ...] = ()
    in_row: tuple[tuple[slice, CarriedSpan], ...] = ()
    pictures: tuple[Pictures, ...] = ()
    chunk: Chunk | None = None
    weight: float = 1.0
    members: tuple[Member, ...] = ()
    tokens_2T: np.ndarray = field(default_factory=lambda: np.empty((2, 0), np.int64))

    @property
    def rows(self) -> list[int]:
        """Place of each completion that is trained on among the rollouts of the step."""
        return [member.row for member in self.members if member.trained is not None]

    def unique(self, name: Literal["source", "target_id"]) -> torch.Tensor:
        """Return a column of the N axis with that of the M axis after it, for the unique tokens.

        With candidates, the ids are each token's and after it those of its candidates, shape (N + M, 1 + K).
        """
        columns, values = self.columns, self.columns[name]
        more = columns.get(f"ce_{name}")
        if name == "target_id" and (candidates_NK := columns.get("candidate_ids")) is not None:
            values = torch.cat([values[:, None], candidates_NK], 1)
            more = None if more is None else more[:, None].expand(-1, values.shape[1])
        if more is not None:
            values = torch.cat([values, more])
        return values.index_select(0, columns["unique"]) if "unique" in columns else values

    def find_unique(self) -> None:
        """Find tokens that are the same: they have one id, and are predicted from one place."""
        self.columns.pop("unique", None)
        pairs_N2 = torch.stack([self.unique("source"), self.unique("target_id")], 1)
        pairs_U2, inverse_N = pairs_N2.unique(dim=0, return_inverse=True)
        unique_U = torch.empty(len(pairs_U2), dtype=torch.int64)
        unique_U[inverse_N] = torch.arange(len(pairs_N2))
        self.columns |= {"unique": unique_U, "inverse": inverse_N}

    def spread(self, values_U: torch.Tensor) -> torch.Tensor:
        """Give each token the value of the unique one that it is, along the first axis."""
        return values_U.index_select(0, self.columns["inverse"]) if "inverse" in self.columns else values_U

    def filled(self, rollouts: Sequence[Rollout], num_ce_tokens: Sequence[int] = ()) -> PackedRow:
        """Return the row with the columns of its tokens that its rollouts have.

        Args:
            rollouts: The rollouts that have been laid out.
            num_ce_tokens: Number of tokens of the step, on all ranks, that have a weight in the channel ``ce``, for
                each source of weights.
        """
        own = [
            (rollouts[each.row], each.trained, each.num_trained) for each in self.members if each.trained is not None
        ]
        counts, columns = np.array([place.stop - place.start for _, place, _ in own], np.int64), dict(self.columns)
        if any("token_advantage" in rollout.columns for rollout, _, _ in own):
            whole = [rollout.columns.get("token_advantage", torch.tensor(rollout.advantage)) for rollout, _, _ in own]
            parts = [its.expand(number)[place] for its, (_, place, number) in zip(whole, own, strict=True)]
            columns["advantage"] = torch.cat(parts)
        else:
            advantages = np.array([rollout.advantage for rollout, _, _ in own], np.float32)
            columns["advantage"] = torch.from_numpy(np.repeat(advantages, counts))
        if not own:  # a KL term asks for them, of no token too
            columns["reference_logprob"] = torch.empty(0)
        for name, default in OF_TOKENS.items():
            if any(name in rollout.columns for rollout, _, _ in own):
                values = [
                    rollout.columns[name] if name in rollout.columns else torch.full((number,), default)
                    for rollout, _, number in own
                ]
                columns[name] = torch.cat([its[place] for its, (_, place, _) in zip(values, own, strict=True)])
        if self.chunk is not None or any("whole_length" in rollout.columns for rollout, _, _ in own):
            whole_lengths = [rollout.columns.get("whole_length", number) for rollout, _, number in own]
            columns["whole_length"] = torch.tensor(whole_lengths, dtype=torch.int64)
        if self.chunk is not None:
            columns["weight"] = self.chunk.weight * columns.get("weight", torch.ones(int(counts.sum())))
        if OF_CANDIDATES[0] in columns:  # equal tokens may have other candidates: each is by itself
            columns.pop("unique", None)
            columns.pop("inverse", None)
        filled = replace(self, columns=columns, figures={})
        if any(num_ce_tokens):
            _fill_ce(filled, rollouts, num_ce_tokens)
        return filled

    def to(self, device: torch.device | str) -> PackedRow:
        """Return a copy on ``device``, or itself where it is there already."""
        there = torch.device(device)
        if there == self.input_ids_BT.device:
            return self
        tensors = {"input_ids": self.input_ids_BT, "position_ids": self.position_ids_BT, **self.columns}
        if self.stretches:
            tensors |= {"labels": key_labels(self.stretches), **plan_launches(self.stretches).tensors}
        columns = in_one_copy(tensors, there)
        ids_BT, positions_BT = columns.pop("input_ids"), columns.pop("position_ids")
        return replace(self, input_ids_BT=ids_BT, position_ids_BT=positions_BT, columns=columns)


class RowPart(NamedTuple):
    """Completions of one prompt in a row, by their places among the rollouts.

    They stand after their prompt, or follow what was computed ``before`` of it; ``span`` is what other rows see of the
    part: its prompt, or the ``chunk`` that it is of its one completion. ``pictures`` are the images of the prompt.
    """

    prompt_ids: tuple[int, ...]
    members: Sequence[int]
    before: CarriedSpan | None = None
    span: CarriedSpan | None = None
    chunk: Chunk | None = None
    pictures: Pictures | None = None


def in_order(rows: Sequence[PackedRow]) -> Iterator[PackedRow]:
    """Yield the micro-batches of a step, which go through the policy in their order.

    Of a prompt that has responses in several, the last has it in its row, and those before carry it (see
    :class:`~lit_grpo.update.prefix.carried.CarriedSpan`). Chunks of a completion come last first, each with those
    before it carried. What is carried is given up after the last that uses it, so that they can go through again.
    """
    last_uses: dict[CarriedSpan, int] = {}
    for number, row in enumerate(rows):
        for span in (*row.carried, *(own for _, own in row.in_row)):
            last_uses |= dict.fromkeys(span.chain, number)
    given_up: list[list[CarriedSpan]] = [[] for _ in rows]
    for span, number in last_uses.items():
        span.forget()  # what it may have kept of a pass that was broken off
        given_up[number].append(span)
    for row, spans in zip(rows, given_up, strict=True):
        yield row
        for span in spans:
            span.forget()


def empty_row(shared_prefix: bool) -> PackedRow:
    """Return a micro-batch with which a rank that has nothing to learn from can take part."""
    return lay_out([], []) if shared_prefix else lay_out_padded([], [])


def lay_out(rollouts: Sequence[Rollout], parts: Sequence[RowPart], least_shared: int = LEAST_SHARED) -> PackedRow:
    """Lay parts out as one row without padding: a prompt, and what responses begin with in common, once.

    Where nothing would be in the row it has one token. Advantages are 0.

    Args:
        rollouts: Rollouts of the optimizer step, which parts refer to by their places.
        parts: The rollouts of each prompt, or one chunk of one.
        least_shared: The fewest common tokens of responses that stand in the row once.
    """
    stretches, tokens = list[Stretch](), list[np.ndarray]()
    carried, in_row = list[CarriedSpan](), list[tuple[slice, CarriedSpan]]()
    members = list[tuple[int, Rollout, Chunk | None]]()
    sources: list[tuple[int, int]] = []  # where predecessors stand, as (begin, number); carried ones are below 0
    start = num_carried = 0
    seen = list[Placed]()
    for part in parts:
        of_part, its_tokens, paths, observed = _place(part, rollouts, start, len(stretches), least_shared)
        tokens += its_tokens
        prompt, before = of_part[0], start + of_part[0].length - 1
        if part.before is not None:
            carried.append(part.before)
            of_part[0], before = prompt._replace(start=num_carried), -len(carried)
            num_carried += prompt.length
        if part.span is not None:
            in_row.append((slice(start, start + len(part.span.token_ids)), part.span))
        stretches += of_part
        end = start + sum(each.length for each in of_part if not each.carried)
        if part.pictures is not None:
            seen.append(Placed(0, start, end, part.pictures if part.before is None else part.pictures.passed))
        seen += observed
        start = end
        for member, path in zip(part.members, paths, strict=True):
            members.append((member, rollouts[member], part.chunk))
            path.insert(0, (before, 1))
            num_tokens = rollouts[member].completion.num_tokens
            if not num_tokens or (part.chunk is not None and part.chunk.end < num_tokens):
                path[-1] = path[-1][0], path[-1][1] - 1  # nothing here is predicted from the last
            sources += path

    shares = len(sources) - len(members) > len(stretches) - len(parts)
    means_nothing = not start
    if means_nothing:
        stretches.append(Stretch(0, 0, 1, last=len(stretches)))
        tokens, start = [np.zeros(1, np.int64)], 1
    stretches = [each._replace(start=each.start + start) if each.carried else each for each in stretches]
    own = np.array([each[:3] for each in stretches if not each.carried], np.int64)
    begins_R, counts_R = np.array(sources, np.int64).reshape(-1, 2).T
    begins_R = np.where(begins_R < 0, start - 1 - begins_R, begins_R)
    chunk = parts[0].chunk if parts else None
    positions_T = torch.from_numpy(_ranges(own[:, 1], own[:, 2]))
    row = PackedRow(
        input_ids_BT=torch.from_numpy(np.concatenate(tokens, dtype=np.int64))[None],
        position_ids_BT=with_images(positions_T[None], seen) if seen else positions_T[None],
        pictures=tuple(each.pictures for each in seen if each.pictures.images),
        stretches=tuple(stretches),
        carried=tuple(carried),
        in_row=tuple(in_row),
        chunk=chunk,
        weight=0.0 if means_nothing else 1.0 if chunk is None else chunk.weight,
        **_trained_tokens(members, _ranges(begins_R, counts_R)),
    )
    if shares:
        row.find_unique()
    return row


def _place(
    part: RowPart, rollouts: Sequence[Rollout], start: int, number: int, least_shared: int
) -> tuple[list[Stretch], list[np.ndarray], list[list[tuple[int, int]]], list[Placed]]:
    """Place a part in a row: its prompt, where that is not carried, and the tree of its completions.

    Args:
        part: Completions of one prompt, or a chunk of one, to place in the row.
        rollouts: Rollouts of the optimizer step, which the part refers to by their places.
        start: Where its first token stands.
        number: Number of the part's first stretch in the row.
        least_shared: The fewest common tokens of responses that stand in the row once.

    Returns:
        The stretches of its prompt and of its branches; the tokens of those that are not carried; for each completion
        the branches that it passes through, as (where it stands, tokens); and the images of branches.
    """
    first = len(part.prompt_ids) if part.before is None else part.before.end
    tokens = [np.array(part.prompt_ids)] if part.before is None else []
    start += first if part.before is None else 0
    completions = [rollouts[member].completion for member in part.members]
    cut = slice(-1)  # the last predicts nothing
    if part.chunk is not None:
        cut = slice(part.chunk.begin, min(part.chunk.end, completions[0].num_tokens - 1))
    seen = [completion.arrays[0][cut] for completion in completions]
    has_images = any(completion.pictures for completion in completions)
    tree = prefix_tree([each.contents[cut] for each in completions] if has_images else seen, least_shared)
    lasts = list(range(len(tree)))  # the last branch below each, which comes after it
    for own in range(len(tree) - 1, -1, -1):
        parent = tree[own].parent
        if parent is not None:
            lasts[parent] = max(lasts[parent], lasts[own])
    mutual = () if part.pictures is None or part.before is not None else part.pictures.mutual
    stretches = [Stretch(start - first, 0, first, number + len(tree), part.before is not None, mutual)]
    paths: list[list[tuple[int, int]]] = [[] for _ in part.members]
    observed: list[tuple[int, int, Pictures]] = []  # where it begins, and the last branch that follows
    ends: list[int] = []  # of branches
    for branch, last in zip(tree, lasts, strict=True):
        length = branch.end - branch.begin
        for member in branch.members:
            paths[member].append((start, length))
        spans = list[MutualSpan]()
        for place, each in completions[branch.members[0]].pictures:
            if branch.begin <= place < branch.end:
                own = place - branch.begin
                observed.append((start + own, last, each))
                spans += [span._replace(begin=own + span.begin, end=own + span.end) for span in each.mutual]
        stretches.append(Stretch(start, first + branch.begin, length, number + 1 + last, mutual=tuple(spans)))
        tokens.append(seen[branch.members[0]][branch.begin : branch.end])
        start += length
        ends.append(start)
    return stretches, tokens, paths, [Placed(0, begin, ends[last], each) for begin, last, each in observed]


OF_TOKENS: Mapping[str, float] = {
    "reference_logprob": math.nan,
    "old_logprob": math.nan,
    "epsilon": math.nan,
    "mask": True,
    "weight": 1.0,
    **dict.fromkeys(OF_CANDIDATES, math.nan),
}
"""Columns of rollouts that become those of a row, and what a token has whose rollout has none."""


def _fill_ce(row: PackedRow, rollouts: Sequence[Rollout], num_ce_tokens: Sequence[int]) -> None:
    """Fill the columns of the channel ``ce`` of a row."""
    weights, counts = [torch.empty(0, dtype=torch.float32)], [torch.empty(0, dtype=torch.float32)]
    for member in row.members:
        rollout, number = rollouts[member.row], member.end - member.begin
        its_weights = rollout.columns.get("ce_weight")
        weights.append(torch.zeros(number) if its_weights is None else its_weights[member.begin : member.end])
        counts.append(torch.full((number,), float(num_ce_tokens[rollout.ce_source])))
    weights_T, (sources_T, ids_T) = torch.cat(weights), torch.from_numpy(row.tokens_2T)
    places_M = weights_T.nonzero().flatten()
    row.columns |= {
        "ce_weight": weights_T[places_M] * (1.0 if row.chunk is None else row.chunk.weight),
        "ce_count": torch.cat(counts)[places_M],
        "ce_source": sources_T[places_M],
        "ce_target_id": ids_T[places_M],
    }
    if OF_CANDIDATES[0] not in row.columns:
        row.find_unique()


def lay_out_padded(rollouts: Sequence[Rollout], members: Sequence[int]) -> PackedRow:
    """Lay rollouts out one a row, padded on the right; without rollouts, one row of one token.

    Args:
        rollouts: Rollouts of the optimizer step, which ``members`` selects from.
        members: Places of the rollouts to lay out, in ``rollouts``.
    """
    own = [rollouts[member] for member in members]
    longest = max((len(r.prompt.token_ids) + r.completion.num_tokens - 1 for r in own), default=1)
    input_ids_BT = torch.zeros((max(1, len(own)), longest), dtype=torch.int64)
    begins, counts = list[int](), list[int]()
    for row, rollout in enumerate(own):
        prompt_ids, token_ids_T = rollout.prompt.token_ids, rollout.completion.token_ids_T
        tokens_T = torch.cat([torch.tensor(prompt_ids), token_ids_T[:-1]])
        input_ids_BT[row, : len(tokens_T)] = tokens_T
        begins.append(row * longest + len(prompt_ids) - 1)
        counts.append(len(token_ids_T))
    sources_T = _ranges(np.array(begins, np.int64), np.array(counts, np.int64))
    seen: list[Placed] = []
    for row, rollout in enumerate(own):
        if rollout.prompt.pictures is not None:
            seen.append(Placed(row, 0, None, rollout.prompt.pictures))
        begin = len(rollout.prompt.token_ids)
        seen += [Placed(row, begin + place, None, each) for place, each in rollout.completion.pictures]
    return PackedRow(
        input_ids_BT=input_ids_BT,
        position_ids_BT=with_images(torch.arange(longest).repeat(len(input_ids_BT), 1), seen),
        pictures=tuple(each.pictures for each in seen),
        **_trained_tokens([(member, rollouts[member], None) for member in members], sources_T),
    )


def _ranges(begins_R: np.ndarray, counts_R: np.ndarray) -> np.ndarray:
    """So many numbers from each beginning on, one range after another."""
    skipped_R = begins_R - (np.cumsum(counts_R) - counts_R)
    return np.arange(counts_R.sum()) + np.repeat(skipped_R, counts_R)


def _trained_tokens(members: Sequence[tuple[int, Rollout, Chunk | None]], sources_T: np.ndarray) -> dict[str, Any]:
    """Return the fields of a row that say which of its tokens are trained on, completion after completion.

    Args:
        members: Places of rollouts, the rollouts, and the chunk of each that is in the row.
        sources_T: Where the predecessors of all their tokens stand, one after another.
    """
    token_ids, logprobs = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    counts, versions, trained = list[int](), list[int](), list[bool]()  # of segments
    found, lengths, turn_lengths = list[Member](), list[int](), list[int]()
    for row, rollout, chunk in members:
        completion = rollout.completion
        begin, end = (0, completion.num_tokens) if chunk is None else (chunk.begin, chunk.end)
        token_ids_T, logprobs_T = completion.arrays
        token_ids.append(token_ids_T[begin:end])
        logprobs.append(logprobs_T[begin:end])
        position = num_before = num_own = 0
        for num_tokens, version, is_trained in completion.segments:
            counts.append(max(min(position + num_tokens, end) - max(position, begin), 0))
            versions.append(OBSERVED if version is None else version)
            trained.append(is_trained)
            if is_trained:
                num_own += counts[-1]
                num_before += max(min(num_tokens, begin - position), 0)
            position += num_tokens
        place = None
        if "ce_weight" not in rollout.columns or completion.num_trained:  # others have no part in the channel ``rl``
            place = slice(num_before, num_before + num_own)
            lengths.append(num_own)
            turns = [number for _, _, number in completion.places_of_turns]
            turn_lengths += turns if chunk is None else [num_own]  # a chunk is taken for one turn
        found.append(Member(row, begin, end, place, completion.num_trained))
    trained_T = np.repeat(np.array(trained, np.bool_), np.array(counts, np.int64))
    versions_T = np.repeat(np.array(versions, np.int64), np.array(counts, np.int64))
    ids_T = np.concatenate(token_ids)
    columns = {
        "source": torch.from_numpy(sources_T[trained_T]),
        "target_id": torch.from_numpy(ids_T[trained_T]),
        "sampled_logprob": torch.from_numpy(np.concatenate(logprobs)[trained_T]),
        "version": torch.from_numpy(versions_T[trained_T]),
        "advantage": torch.zeros(int(trained_T.sum())),
        "length": torch.tensor(lengths, dtype=torch.int64),
        "turn_length": torch.tensor(turn_lengths, dtype=torch.int64),
    }
    return {"columns": columns, "members": tuple(found), "tokens_2T": np.stack([sources_T, ids_T])}
