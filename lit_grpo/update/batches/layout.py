"""Rollouts laid out as the tensors that go through the policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from lit_grpo.memory import in_one_copy
from lit_grpo.trajectory import OBSERVED, prefix_tree
from lit_grpo.types import Rollout
from lit_grpo.update.plugin import Chunk
from lit_grpo.update.prefix.carried import CarriedSpan
from lit_grpo.update.prefix.layout import Stretch, key_labels

OF_CANDIDATES = ("candidate_ids", "candidate_values")
"""Columns of rollouts with a value for each candidate of each trained token, shape (num_trained, K), or (num_trained,
K + 1) for values of candidates and of all other tokens together."""
LEAST_SHARED = 32
"""Tokens that completions of a prompt have to begin with in common to share them: fewer are not worth a call."""


@dataclass
class PackedRow:
    """A micro-batch: one row without padding, and the columns that its tokens are trained on.

    A prompt stands in it once, with its responses after it, each of which counts its positions from the prompt's end.
    Tokens that several responses begin with stand there once too, wherever they come from: a tree of rollouts, or equal
    completions. ``stretches`` say what is where, and which tokens see which; on a device other than the host
    ``labels_3K`` says it (see :func:`lit_grpo.update.prefix.layout.key_labels`). ``carried`` is what the row sees of
    other micro-batches, a span for each stretch that is, and ``in_row`` what others have seen of it, with its place.
    For models that cannot share a prefix there are no stretches: each completion has a row of its own after its prompt,
    padded on the right (under causal attention padding on the right is never seen, so there is no attention mask, and
    no pad id can be mistaken for a token).

    The completion tokens that are trained on, one completion after another, are the N axis; all others (observed ones)
    stand in the row and nowhere else, so that no sum, mean or ratio can meet them. ``source_N`` says where in the
    flattened (B, T) the *predecessor* of each token stands, whose hidden state predicts it; that of a response's first
    token is the prompt's last. The last tokens of carried spans count as standing after the row, one after another.
    ``versions_N`` are the policy versions that sampled them, and ``advantages_N`` their advantages, of which those of
    one completion may differ. ``lengths_C``, the number of its tokens on the N axis, is per completion, in the order of
    that axis, and ``turn_lengths_S`` per turn. On the host, ``rows`` is each completion's place among the rollouts of
    the step, ``places`` which of its tokens that are trained on these are, and ``num_trained`` how many there are of
    it. Where the row is a ``chunk`` of a completion it has no other. ``weight`` is what its tokens count: 1, or the
    chunk's weight; 0 where the row is a token that stands for nothing. Further columns hold what a step needs of its
    tokens, and are filled by :meth:`MicroBatches.filled`.

    Tokens with a weight in the channel ``ce`` are the M axis, observed tokens among them: ``ce_source_M``,
    ``ce_target_ids_M``, ``ce_weights_M`` and ``ce_counts_M``, filled if the step has such tokens. ``members`` has for
    each completion in the row its place among the rollouts of the step, and the begin and end of its tokens that are in
    the row; ``all_source_T`` and ``all_ids_T`` are the sources and ids of all these tokens.

    ``candidate_ids_NK`` are further tokens of the vocabulary at each place of the N axis, whose log-probs the loss
    gets, and ``candidate_values_NK`` what a method knows of each of them, and perhaps of the rest.

    Where completions share tokens, ``distinct_U`` are the places, on the N axis with the M axis after it, of one of
    each that are the same, and ``same_N`` says which of them each token is: log-probs are computed of the distinct ones
    alone.

    Example:
        The prompt [5, 6] with the completions [7, 8] and [9, 4, 3]::

            input_ids_BT    = [[5, 6, 7, 9, 4]]
            position_ids_BT = [[0, 1, 2, 2, 3]]
            stretches = (Stretch(0, 0, 2, last=2), Stretch(2, 2, 1, last=1), Stretch(3, 2, 2, last=2))
            source_N = [1, 2, 1, 3, 4]    target_ids_N = [7, 8, 9, 4, 3]    lengths_C = [2, 3]
    """

    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    source_N: torch.Tensor
    target_ids_N: torch.Tensor
    sampled_logprobs_N: torch.Tensor
    versions_N: torch.Tensor
    advantages_N: torch.Tensor
    lengths_C: torch.Tensor
    turn_lengths_S: torch.Tensor
    rows: tuple[int, ...]
    places: tuple[slice, ...]
    num_trained: tuple[int, ...]
    stretches: tuple[Stretch, ...] = ()
    carried: tuple[CarriedSpan, ...] = ()
    in_row: tuple[tuple[slice, CarriedSpan], ...] = ()
    chunk: Chunk | None = None
    weight: float = 1.0
    labels_3K: torch.Tensor | None = None
    old_logprobs_N: torch.Tensor | None = None
    reference_logprobs_N: torch.Tensor | None = None
    kept_N: torch.Tensor | None = None
    weights_N: torch.Tensor | None = None
    whole_lengths_C: torch.Tensor | None = None
    candidate_ids_NK: torch.Tensor | None = None
    candidate_values_NK: torch.Tensor | None = None
    members: tuple[tuple[int, int, int], ...] = ()
    all_source_T: np.ndarray | None = None
    all_ids_T: np.ndarray | None = None
    ce_source_M: torch.Tensor | None = None
    ce_target_ids_M: torch.Tensor | None = None
    ce_weights_M: torch.Tensor | None = None
    ce_counts_M: torch.Tensor | None = None
    distinct_U: torch.Tensor | None = None
    same_N: torch.Tensor | None = None

    @property
    def spans(self) -> list[CarriedSpan]:
        """All that it sees of other micro-batches, and they of it."""
        return [span for last in (*self.carried, *(own for _, own in self.in_row)) for span in last.chain]

    @property
    def source_U(self) -> torch.Tensor:
        """Places of the predecessors of the distinct tokens."""
        source_N = self.source_N if self.ce_source_M is None else torch.cat([self.source_N, self.ce_source_M])
        return source_N if self.distinct_U is None else source_N.index_select(0, self.distinct_U)

    @property
    def target_ids_U(self) -> torch.Tensor:
        """Ids of the distinct tokens; with candidates each token's, then those of its candidates."""
        ids_N, ce_ids_M, candidates_NK = self.target_ids_N, self.ce_target_ids_M, self.candidate_ids_NK
        if candidates_NK is not None:
            ids_N = torch.cat([ids_N[:, None], candidates_NK], 1)
            ce_ids_M = None if ce_ids_M is None else ce_ids_M[:, None].expand(-1, ids_N.shape[1])
        ids_N = ids_N if ce_ids_M is None else torch.cat([ids_N, ce_ids_M])
        return ids_N if self.distinct_U is None else ids_N.index_select(0, self.distinct_U)

    def find_distinct(self) -> None:
        """Find tokens that are the same: they have one id, and are predicted from one place."""
        self.distinct_U = None
        pairs_N2 = torch.stack([self.source_U, self.target_ids_U], 1)
        pairs_U2, self.same_N = pairs_N2.unique(dim=0, return_inverse=True)
        self.distinct_U = torch.empty(len(pairs_U2), dtype=torch.int64)
        self.distinct_U[self.same_N] = torch.arange(len(pairs_N2))

    def spread(self, values_U: torch.Tensor) -> torch.Tensor:
        """Give each token the value of the distinct one that it is, along the first axis."""
        return values_U if self.same_N is None else values_U.index_select(0, self.same_N)

    def to(self, device: torch.device | str) -> PackedRow:
        """Return a copy on ``device``, or itself where it is there already."""
        there = torch.device(device)
        if there == self.input_ids_BT.device:
            return self
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        if self.stretches:
            tensors["labels_3K"] = key_labels(self.stretches)
        return replace(self, **in_one_copy(tensors, there))


class RowPart(NamedTuple):
    """Completions of one prompt in a row, by their places among the rollouts.

    They stand after their prompt, or follow what was computed ``before`` of it; ``span`` is what other rows see of the
    part: its prompt, or the ``chunk`` that it is of its one completion.
    """

    prompt_ids: tuple[int, ...]
    members: Sequence[int]
    before: CarriedSpan | None = None
    span: CarriedSpan | None = None
    chunk: Chunk | None = None


@dataclass(frozen=True)
class MicroBatches(Iterable[PackedRow]):
    """The micro-batches of a step.

    They are to go through the policy in their order: of a prompt that has responses in several, the last has it in its
    row, and those before carry it (see :class:`~lit_grpo.update.prefix.carried.CarriedSpan`). Chunks of a completion
    come last first, each with those before it carried. What is carried is given up after the last that uses it, so that
    they can go through again.

    Args:
        rows: The micro-batches.
        shared_prefix: Whether they are packed, so that empty ones are, too.
    """

    rows: Sequence[PackedRow]
    shared_prefix: bool

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[PackedRow]:
        last_uses = {span: number for number, row in enumerate(self.rows) for span in row.spans}
        for span in last_uses:
            span.forget()  # what they may have kept of a pass that was broken off
        for number, row in enumerate(self.rows):
            yield row
            for span in row.spans:
                if last_uses[span] == number:
                    span.forget()

    def filled(
        self,
        rollouts: Sequence[Rollout],
        columns: Sequence[str] = (),
        lengths: Sequence[int] | None = None,
        num_ce_tokens: Sequence[int] = (),
    ) -> MicroBatches:
        """Return these, whose tokens have the advantages and other values of their rollouts.

        Args:
            rollouts: The rollouts that have been laid out.
            columns: Names of :attr:`~lit_grpo.types.Rollout.columns` that each of them has: ``old_logprobs``,
                ``reference_logprobs``, ``kept``, ``weights``, or those of :data:`OF_CANDIDATES`.
            lengths: Number of trained tokens of each whole completion; None if the rollouts' own are whole.
            num_ce_tokens: Number of tokens of the step, on all ranks, that have a weight in the channel ``ce``, for
                each source of weights.
        """
        rows: list[PackedRow] = []
        for row in self.rows:
            own = [rollouts[place] for place in row.rows]
            counts = [place.stop - place.start for place in row.places]
            if any(rollout.token_advantages is not None for rollout in own):
                parts = list[torch.Tensor]()
                for rollout, number, place in zip(own, row.num_trained, row.places, strict=True):
                    of_tokens = rollout.token_advantages
                    of_tokens = torch.tensor(rollout.advantage) if of_tokens is None else of_tokens
                    parts.append(of_tokens.expand(number)[place])
                advantages_N = torch.cat(parts)
            else:
                advantages = np.array([rollout.advantage for rollout in own], np.float32)
                advantages_N = torch.from_numpy(np.repeat(advantages, np.array(counts, np.int64)))
            values: dict[str, torch.Tensor | None] = {"advantages_N": advantages_N}
            for name in columns:
                parts = [rollout.columns[name][place] for rollout, place in zip(own, row.places, strict=True)]
                if name not in OF_CANDIDATES:
                    values[f"{name}_N"] = torch.cat(parts) if parts else torch.empty(0)
                elif parts:  # equal tokens may have other candidates, so each is computed by itself
                    values |= {f"{name}_NK": torch.cat(parts), "distinct_U": None, "same_N": None}
            if lengths is not None or row.chunk is not None:
                whole = row.num_trained if lengths is None else [lengths[place] for place in row.rows]
                values["whole_lengths_C"] = torch.tensor(whole, dtype=torch.int64)
            if row.chunk is not None:
                weights_N = values.get("weights_N")
                values["weights_N"] = row.chunk.weight * (torch.ones(sum(counts)) if weights_N is None else weights_N)
            filled = replace(row, **values)
            if any(num_ce_tokens):
                _fill_ce(filled, rollouts, num_ce_tokens)
            rows.append(filled)
        return MicroBatches(rows, self.shared_prefix)

    def and_empty(self, number: int) -> MicroBatches:
        """Return these, and as many empty ones after them, so that a rank with nothing to learn from can take part."""
        empty = [lay_out([], []) if self.shared_prefix else lay_out_padded([], []) for _ in range(number)]
        return MicroBatches([*self.rows, *empty], self.shared_prefix)


def lay_out(rollouts: Sequence[Rollout], parts: Sequence[RowPart], least_shared: int = LEAST_SHARED) -> PackedRow:
    """Lay parts out as one row without padding: a prompt, and what responses begin with in common, once.

    Where nothing would be in the row it has one token. Advantages are 0.

    Args:
        rollouts: Of the step.
        parts: The rollouts of each prompt, or one chunk of one.
        least_shared: The fewest common tokens of responses that stand in the row once.
    """
    stretches, tokens = list[Stretch](), list[np.ndarray]()
    carried, in_row = list[CarriedSpan](), list[tuple[slice, CarriedSpan]]()
    members = list[tuple[int, Rollout, Chunk | None]]()
    sources: list[tuple[int, int]] = []  # where predecessors stand, as (begin, number); carried ones are below 0
    start = num_carried = 0
    for part in parts:
        of_part, its_tokens, paths = _place(part, rollouts, start, len(stretches), least_shared)
        tokens += its_tokens
        prompt, before = of_part[0], start + of_part[0].length - 1
        if part.before is not None:
            carried.append(part.before)
            of_part[0], before = prompt._replace(start=num_carried), -len(carried)
            num_carried += prompt.length
        if part.span is not None:
            in_row.append((slice(start, start + len(part.span.token_ids)), part.span))
        stretches += of_part
        start += sum(each.length for each in of_part if not each.carried)
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
    row = PackedRow(
        input_ids_BT=torch.from_numpy(np.concatenate(tokens, dtype=np.int64))[None],
        position_ids_BT=torch.from_numpy(_ranges(own[:, 1], own[:, 2]))[None],
        stretches=tuple(stretches),
        carried=tuple(carried),
        in_row=tuple(in_row),
        chunk=chunk,
        weight=0.0 if means_nothing else 1.0 if chunk is None else chunk.weight,
        **_learnt_tokens(members, _ranges(begins_R, counts_R)),
    )
    if shares:
        row.find_distinct()
    return row


def _place(
    part: RowPart, rollouts: Sequence[Rollout], start: int, number: int, least_shared: int
) -> tuple[list[Stretch], list[np.ndarray], list[list[tuple[int, int]]]]:
    """Place a part in a row: its prompt, where that is not carried, and the tree of its completions.

    Args:
        part: Of the row.
        rollouts: Of the step.
        start: Where its first token stands.
        number: Of its first stretch.
        least_shared: The fewest common tokens of responses that stand in the row once.

    Returns:
        The stretches of its prompt and of its branches; the tokens of those that are not carried; and for each
        completion the branches that it passes through, as (where it stands, tokens).
    """
    first = len(part.prompt_ids) if part.before is None else part.before.end
    tokens = [np.array(part.prompt_ids)] if part.before is None else []
    start += first if part.before is None else 0
    seen = [rollouts[member].completion.arrays[0][:-1] for member in part.members]  # the last predicts nothing
    if part.chunk is not None:
        seen = [token_ids_T[part.chunk.begin : part.chunk.end] for token_ids_T in seen]
    tree = prefix_tree(seen, least_shared)
    lasts = list(range(len(tree)))  # the last branch below each, which comes after it
    for own in range(len(tree) - 1, -1, -1):
        parent = tree[own].parent
        if parent is not None:
            lasts[parent] = max(lasts[parent], lasts[own])
    stretches = [Stretch(start - first, 0, first, number + len(tree), carried=part.before is not None)]
    paths: list[list[tuple[int, int]]] = [[] for _ in part.members]
    for branch, last in zip(tree, lasts, strict=True):
        length = branch.end - branch.begin
        for member in branch.members:
            paths[member].append((start, length))
        stretches.append(Stretch(start, first + branch.begin, length, number + 1 + last))
        tokens.append(seen[branch.members[0]][branch.begin : branch.end])
        start += length
    return stretches, tokens, paths


def _fill_ce(row: PackedRow, rollouts: Sequence[Rollout], num_ce_tokens: Sequence[int]) -> None:
    """Fill the columns of the channel ``ce`` of a row."""
    weights, counts = [torch.empty(0, dtype=torch.float32)], [torch.empty(0, dtype=torch.float32)]
    for place, begin, end in row.members:
        its_weights, count = rollouts[place].ce_weights, num_ce_tokens[rollouts[place].ce_source]
        weights.append(torch.zeros(end - begin) if its_weights is None else its_weights[begin:end])
        counts.append(torch.full((end - begin,), float(count)))
    weights_T = torch.cat(weights)
    places_M = weights_T.nonzero().flatten()
    row.ce_counts_M = torch.cat(counts)[places_M]
    row.ce_weights_M = weights_T[places_M] * (1.0 if row.chunk is None else row.chunk.weight)
    row.ce_source_M = torch.as_tensor(row.all_source_T)[places_M]
    row.ce_target_ids_M = torch.as_tensor(row.all_ids_T)[places_M]
    if row.candidate_ids_NK is None:
        row.find_distinct()


def lay_out_padded(rollouts: Sequence[Rollout], members: Sequence[int]) -> PackedRow:
    """Lay rollouts out one a row, padded on the right; without rollouts, one row of one token.

    Args:
        rollouts: Of the step.
        members: Which of them, by their places.
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
    return PackedRow(
        input_ids_BT=input_ids_BT,
        position_ids_BT=torch.arange(longest).repeat(len(input_ids_BT), 1),
        **_learnt_tokens([(member, rollouts[member], None) for member in members], sources_T),
    )


def _ranges(begins_R: np.ndarray, counts_R: np.ndarray) -> np.ndarray:
    """So many numbers from each beginning on, one range after another."""
    skipped_R = begins_R - (np.cumsum(counts_R) - counts_R)
    return np.arange(counts_R.sum()) + np.repeat(skipped_R, counts_R)


def _learnt_tokens(members: Sequence[tuple[int, Rollout, Chunk | None]], sources_T: np.ndarray) -> dict[str, Any]:
    """Return the objective's columns of the tokens that are trained on, completion after completion.

    Args:
        members: Places of rollouts, the rollouts, and the chunk of each that is in the row.
        sources_T: Where the predecessors of all their tokens stand, one after another.
    """
    token_ids, logprobs = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    counts, versions, trained = list[int](), list[int](), list[bool]()  # of segments
    places, turn_lengths = list[slice](), list[int]()
    rows, num_trained, in_row = list[int](), list[int](), list[tuple[int, int, int]]()
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
        in_row.append((row, begin, end))
        if rollout.ce_weights is None or completion.num_trained:  # others have no part in the channel ``rl``
            rows.append(row)
            num_trained.append(completion.num_trained)
            places.append(slice(num_before, num_before + num_own))
            turn_lengths += completion.trained_of_turns if chunk is None else [num_own]  # a chunk is taken for one turn
    trained_T = np.repeat(np.array(trained, np.bool_), np.array(counts, np.int64))
    versions_T = np.repeat(np.array(versions, np.int64), np.array(counts, np.int64))
    all_ids_T = np.concatenate(token_ids)
    return {
        "source_N": torch.from_numpy(sources_T[trained_T]),
        "target_ids_N": torch.from_numpy(all_ids_T[trained_T]),
        "sampled_logprobs_N": torch.from_numpy(np.concatenate(logprobs)[trained_T]),
        "versions_N": torch.from_numpy(versions_T[trained_T]),
        "advantages_N": torch.zeros(int(trained_T.sum())),
        "lengths_C": torch.tensor([place.stop - place.start for place in places], dtype=torch.int64),
        "turn_lengths_S": torch.tensor(turn_lengths, dtype=torch.int64),
        "rows": tuple(rows),
        "places": tuple(places),
        "num_trained": tuple(num_trained),
        "members": tuple(in_row),
        "all_source_T": sources_T,
        "all_ids_T": all_ids_T,
    }
