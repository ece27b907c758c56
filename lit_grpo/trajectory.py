"""Tokens that know where they come from, and which of them sequences have in common."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

    Values = torch.Tensor | np.ndarray | Sequence[int] | Sequence[float] | Sequence[bool]


class Segment(NamedTuple):
    """A stretch of tokens of one origin.

    ``version`` is that of the policy that sampled them; None where they were *observed* (a tool's answer):
    those stand in the row and are never trained on. Sampled ones are, unless ``trained`` is False.
    """

    num_tokens: int
    version: int | None
    trained: bool = True


OBSERVED = -1
"""Stands for the version of tokens that no policy has sampled."""


@lru_cache(4096)
def _uniform(num_tokens: int, version: int, trained: bool) -> tuple[Segment]:
    """Return one segment; equal ones share memory."""
    return (Segment(num_tokens, None if version == OBSERVED else version, trained),)


def _array(values_T: Values, dtype: str) -> np.ndarray:
    detach = getattr(values_T, "detach", None)  # of a tensor
    return np.ascontiguousarray(values_T if detach is None else detach().cpu().numpy(), dtype=dtype)


def _tensor(values_T: np.ndarray) -> torch.Tensor:
    """A tensor on the memory of an array; it may take part in autograd, wherever it is asked for."""
    import torch

    with torch.inference_mode(False):
        return torch.from_numpy(values_T)


class MutualSpan(NamedTuple):
    """Tokens of an image, from ``begin`` to ``end``, which see one another in both directions.

    They do so in all layers if ``everywhere``, and else in those with a sliding window alone.
    """

    begin: int
    end: int
    everywhere: bool


@dataclass(frozen=True, eq=False)
class Pictures:
    """The images of a prompt or an observation, as files; pixels are made when the policy reads them, and not kept.

    Attributes:
        images: Files of the images, in the order of their placeholders.
        digest: A digest of the pixels.
        positions_3P: Positions of its tokens in time, height and width (M-RoPE), counted from its first token, int64,
            shape (3, P); None for a policy with one position a token.
        shift: How much fewer positions than tokens it takes: 0 without ``positions_3P``.
        num_tokens: Number of its tokens, text among them.
        mutual: The tokens of each image, if they see one another in both directions, counted from its first token.
        marked_ids: Its tokens with one for each image.
    """

    images: tuple[bytes, ...]
    digest: bytes
    positions_3P: torch.Tensor | None = None
    shift: int = 0
    num_tokens: int = 0
    mutual: tuple[MutualSpan, ...] = ()
    marked_ids: tuple[int, ...] = ()

    @property
    def passed(self) -> Pictures:
        """The same without images, for tokens that come after them: how far these shift positions is left."""
        none_3P = None if self.positions_3P is None else self.positions_3P[:, :0]
        return Pictures((), self.digest, none_3P, self.shift)


class Trajectory:
    """Tokens after a prompt with their log-probs, in segments that say where they come from.

    ``token_ids_T`` (int64), ``logprobs_T`` (float32, of the distribution that was sampled from; 0 where observed),
    ``versions_T`` (int64, the policy version that sampled each token, or ``OBSERVED``) and ``trained_T`` (bool, whether
    it is trained on) lie on the CPU and have equal length. ``entropy`` is the mean entropy, in nats, of the
    distributions that its tokens were sampled from; NaN where the generator does not tell.

    A token takes eight bytes, and there are no tensors until they are asked for: ``logprobs_T`` is then the memory that
    is kept, the others are copies. Ids, log-probs and versions can be assigned as a whole.

    Of its ``num_tokens`` a policy has sampled ``num_sampled``, and ``num_trained`` are trained on. ``oldest_version``
    is that of its oldest sampled token; None where there is none.

    Where its turns were sampled after other tokens than those before them here, such as a conversation whose earlier
    turns were written again without their reasoning, ``contexts`` has for each turn the tokens between the prompt and
    it, and ``rows`` its rows of tokens in the update.

    ``pictures`` are images that were observed, each with the place of the first token of its observation.

    ``engines`` names the engines that have sampled it, each with the place of its first token; empty where the policy
    itself has.

    Args:
        token_ids_T: Token ids: tensor, array or sequence.
        logprobs_T: Log-probs of the tokens, in the same form.
        versions_T: Policy versions that sampled the tokens, in the same form.
        trained_T: Tokens that are trained on, in the same form; by default all that were sampled.
        entropy: Mean entropy in nats; NaN if the generator returns none.
        contexts: Tokens between the prompt and each turn; empty if every turn was sampled after all tokens before it.
        pictures: Images that were observed, and the place of the first token of the observation of each.
    """

    __slots__ = (
        "_memory",
        "contexts",
        "engines",
        "entropy",
        "num_sampled",
        "num_tokens",
        "num_trained",
        "oldest_version",
        "pictures",
        "segments",
    )

    def __init__(
        self,
        token_ids_T: Values = (),
        logprobs_T: Values = (),
        versions_T: Values = (),
        trained_T: Values | None = None,
        entropy: float = math.nan,
        contexts: Sequence[Sequence[int]] = (),
        pictures: Sequence[tuple[int, Pictures]] = (),
    ) -> None:
        ids_T = _array(token_ids_T, "int32")
        self.num_tokens = len(ids_T)
        self._memory = bytearray(ids_T) + bytearray(_array(logprobs_T, "float32"))  # ids, then log-probs
        self._cut(versions_T, trained_T)
        self.entropy = entropy
        self.contexts, self.pictures = tuple(map(tuple, contexts)), tuple(pictures)
        self.engines: tuple[tuple[int, str], ...] = ()

    @classmethod
    def blank(cls, num_tokens: int) -> Trajectory:
        """Return so many tokens that mean nothing, where only lengths count; their version is 0."""
        trajectory = Trajectory()
        trajectory._memory, trajectory.num_tokens = bytearray(8 * num_tokens), num_tokens
        trajectory.segments = _uniform(num_tokens, 0, True) if num_tokens else ()
        trajectory.num_sampled = trajectory.num_trained = num_tokens
        trajectory.oldest_version = 0 if num_tokens else None
        return trajectory

    def _cut(self, versions_T: Values, trained_T: Values | None = None) -> None:
        """Keep the segments, one where neither version nor training changes, and what is counted of them."""
        versions = _array(versions_T, "int64")
        trained = versions != OBSERVED if trained_T is None else _array(trained_T, "bool") & (versions != OBSERVED)
        changes = (np.flatnonzero((np.diff(versions) != 0) | (np.diff(trained) != 0)) + 1).tolist()
        parts = [
            _uniform(end - begin, int(versions[begin]), bool(trained[begin]))
            for begin, end in itertools.pairwise([0, *changes, len(versions)])
            if end
        ]
        self.segments = parts[0] if len(parts) == 1 else tuple(itertools.chain(*parts))
        self.num_sampled = self.num_trained = 0
        self.oldest_version: int | None = None
        for num_tokens, version, is_trained in self.segments:
            self.num_trained += num_tokens if is_trained else 0
            if version is not None:
                self.num_sampled += num_tokens
                self.oldest_version = min(version, version if self.oldest_version is None else self.oldest_version)

    @property
    def num_observed(self) -> int:
        """Number of tokens that no policy has sampled."""
        return self.num_tokens - self.num_sampled

    @property
    def newest_version(self) -> int | None:
        """The version of its newest sampled token; None where there is none."""
        return max((segment.version for segment in self.segments if segment.version is not None), default=None)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens, int32, and their log-probs, float32: the memory that is kept."""
        ids_T = np.frombuffer(self._memory, np.int32, self.num_tokens)
        return ids_T, np.frombuffer(self._memory, np.float32, offset=ids_T.nbytes)

    @property
    def contents(self) -> np.ndarray:
        """Numbers that tell its tokens from those of others, int32: their ids, below 0 in observations with images.

        There they are of the images' digest: placeholders of other images have the same ids.
        """
        ids_T = self.arrays[0]
        if self.pictures:
            ids_T = ids_T.copy()
            for place, each in self.pictures:
                own_T = ids_T[place : place + each.num_tokens]
                digest = blake2b(own_T.tobytes(), digest_size=16, key=each.digest).digest()
                own_T[:] = np.resize(np.frombuffer(digest, np.int32) | np.int32(-(2**31)), len(own_T))
        return ids_T

    @property
    def token_ids_T(self) -> torch.Tensor:
        """The tokens, int64; a copy."""
        return _tensor(self.arrays[0].astype(np.int64))

    @token_ids_T.setter
    def token_ids_T(self, token_ids_T: Values) -> None:
        logprobs = self._memory[4 * self.num_tokens :]
        self._memory, self.num_tokens = bytearray(_array(token_ids_T, "int32")) + logprobs, len(token_ids_T)

    @property
    def logprobs_T(self) -> torch.Tensor:
        """Their log-probs, float32; what is written to it is kept."""
        return _tensor(self.arrays[1])

    @logprobs_T.setter
    def logprobs_T(self, logprobs_T: Values) -> None:
        self._memory = self._memory[: 4 * self.num_tokens] + bytearray(_array(logprobs_T, "float32"))

    @property
    def versions_T(self) -> torch.Tensor:
        """The policy versions that sampled them, int64; a copy."""
        versions = [OBSERVED if version is None else version for _, version, _ in self.segments]
        counts = [segment.num_tokens for segment in self.segments]
        return _tensor(np.repeat(np.array(versions, np.int64), np.array(counts, np.int64)))

    @versions_T.setter
    def versions_T(self, versions_T: Values) -> None:
        self._cut(versions_T)

    @property
    def turns(self) -> list[list[int]]:
        """The tokens of each turn: a stretch of sampled tokens, between two that were observed."""
        token_ids: list[int] = self.token_ids_T.tolist()
        return [token_ids[begin:end] for begin, end, _ in self.places_of_turns]

    @property
    def places_of_turns(self) -> list[tuple[int, int, int]]:
        """Beginning and end of each turn, and how many of its tokens are trained on."""
        places: list[tuple[int, int, int]] = []
        end, in_turn = 0, False
        for num_tokens, version, is_trained in self.segments:
            end, is_sampled = end + num_tokens, version is not None
            if is_sampled:
                begin, _, before = places.pop() if in_turn else (end - num_tokens, end, 0)
                places.append((begin, end, before + (num_tokens if is_trained else 0)))
            in_turn = is_sampled
        return places

    @property
    def rows(self) -> list[Trajectory]:
        """Sequences that are trained on: itself, or where it has ``contexts``, each turn after its own.

        Together they have each sampled token once.
        """
        if not self.contexts:
            return [self]
        columns = [values.tolist() for values in (self.token_ids_T, self.logprobs_T, self.versions_T, self.trained_T)]
        rows: list[Trajectory] = []
        for context, (begin, end, _) in zip(self.contexts, self.places_of_turns, strict=True):
            token_ids, logprobs, versions, trained = (values[begin:end] for values in columns)
            number = len(context)
            row = Trajectory(
                token_ids_T=[*context, *token_ids],
                logprobs_T=[*[0.0] * number, *logprobs],
                versions_T=[*[OBSERVED] * number, *versions],
                trained_T=[*[False] * number, *trained],
                entropy=self.entropy,
            )
            rows.append(row)
        return rows

    def of_turns(self, values: Sequence[float]) -> torch.Tensor:
        """Give each token that is trained on the value of its turn, float32.

        Args:
            values: One for each of ``turns``.
        """
        import torch

        counts = torch.tensor([number for _, _, number in self.places_of_turns], dtype=torch.int64)
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(counts)

    @property
    def sampled_ids(self) -> list[int]:
        """The tokens of all turns, without those that were observed."""
        token_ids, sampled, begin = self.arrays[0].tolist(), [], 0
        for segment in self.segments:
            if segment.version is not None:
                sampled += token_ids[begin : begin + segment.num_tokens]
            begin += segment.num_tokens
        return sampled

    @property
    def trained_T(self) -> torch.Tensor:
        """True if they are trained on, bool; a copy."""
        trained = [segment.trained for segment in self.segments]
        counts = [segment.num_tokens for segment in self.segments]
        return _tensor(np.repeat(np.array(trained, bool), np.array(counts, np.int64)))

    def take(self, other: Trajectory) -> None:
        """Become what another is, and share its memory."""
        self._memory, self.num_tokens = other._memory, other.num_tokens
        self.entropy, self.contexts, self.engines = other.entropy, other.contexts, other.engines
        self.pictures = other.pictures
        self.segments, self.oldest_version = other.segments, other.oldest_version
        self.num_sampled, self.num_trained = other.num_sampled, other.num_trained

    def until(self, num_tokens: int) -> Trajectory:
        """Return its first tokens; ``entropy`` stays, as the best that is known of them.

        Raises:
            ValueError: They end within an observation with images.
        """
        columns = (self.token_ids_T, self.logprobs_T, self.versions_T, self.trained_T)
        part = Trajectory(*(values_T[:num_tokens] for values_T in columns), entropy=self.entropy)
        part.engines, part.pictures = self.engines, self.pictures_until(num_tokens)
        return part

    def pictures_until(self, num_tokens: int) -> tuple[tuple[int, Pictures], ...]:
        """Return the images among its first tokens, or raise a ``ValueError`` if these end within an observation."""
        found = tuple((place, each) for place, each in self.pictures if place < num_tokens)
        if found and found[-1][0] + found[-1][1].num_tokens > num_tokens:
            raise ValueError(f"A trajectory is cut after {num_tokens} tokens, within an observation with images.")
        return found

    def followed_by(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None = None,
        version: int | None = None,
        pictures: Pictures | None = None,
    ) -> Trajectory:
        """Return this followed by more tokens: sampled with ``logprobs`` by ``version``, or observed without.

        ``pictures`` are the images among observed ones.
        """
        number = len(token_ids)
        whole = Trajectory(
            [*self.token_ids_T.tolist(), *token_ids],
            [*self.logprobs_T.tolist(), *(logprobs or [0.0] * number)],
            [*self.versions_T.tolist(), *[OBSERVED if version is None else version] * number],
            [*self.trained_T.tolist(), *[True] * number],
            self.entropy,
            pictures=self.pictures if pictures is None else (*self.pictures, (self.num_tokens, pictures)),
        )
        whole.engines = self.engines
        return whole


EMPTY = Trajectory()
"""Nothing yet; it is never written to."""


class Branch(NamedTuple):
    """Tokens that some sequences have in common, at the positions from ``begin`` to before ``end``.

    ``parent`` is the number of the branch that ends where this one begins, None for one that begins at position 0, and
    ``members`` are the numbers of the sequences that pass through it, ascending.
    """

    parent: int | None
    begin: int
    end: int
    members: tuple[int, ...]


def prefix_tree(sequences: Sequence[np.ndarray], least: int = 1) -> list[Branch]:
    """Return the branches of a tree in which each sequence is a path from a root, in depth-first order.

    For example, ``[5, 6, 7]``, ``[5, 6, 8, 9]`` and ``[4]`` have ``[5, 6]`` (both members), ``[7]``, ``[8, 9]`` and
    ``[4]``. A sequence without tokens passes through none, and equal sequences pass through the same. Branches after
    the same one are in the order of their first members.

    Args:
        sequences: Token ids of one dtype, each of shape (T,).
        least: Fewer common tokens than these are left with each sequence, so that a branch of several members has at
            least so many.
    """
    if len({sequence[:least].tobytes() for sequence in sequences}) == len(sequences):  # so that none shares so many
        return [Branch(None, 0, len(own), (number,)) for number, own in enumerate(sequences) if len(own)]
    contents = [np.ascontiguousarray(sequence).tobytes() for sequence in sequences]
    order = sorted(range(len(sequences)), key=contents.__getitem__)  # those with a common prefix are neighbors
    common = [0, *(num_common(sequences[a], sequences[b]) for a, b in itertools.pairwise(order))]
    branches: list[Branch] = []
    todo: list[tuple[slice, int, int | None]]
    todo = [(part, 0, None) for part in _parts(common, order, slice(0, len(order)), least)]
    while todo:
        neighbors, depth, parent = todo.pop()
        members = order[neighbors]
        end = len(sequences[members[0]]) if len(members) == 1 else min(common[neighbors.start + 1 : neighbors.stop])
        if end > depth:
            branches.append(Branch(parent, depth, end, tuple(sorted(members))))
        if len(members) > 1:
            todo += [(part, end, len(branches) - 1) for part in _parts(common, order, neighbors, end + least)]
    return branches


def _parts(common: Sequence[int], order: Sequence[int], neighbors: slice, least: int) -> list[slice]:
    """Part neighbors in ``order`` where fewer than ``least`` tokens are common; that of the first member is last."""
    cuts = [place for place in range(neighbors.start + 1, neighbors.stop) if common[place] < least]
    bounds = [neighbors.start, *cuts, neighbors.stop]
    parts = [slice(begin, end) for begin, end in itertools.pairwise(bounds) if begin < end]
    return sorted(parts, key=lambda part: -min(order[part]))


def num_common(first: np.ndarray, second: np.ndarray) -> int:
    """The number of tokens with which both begin."""
    shorter = min(len(first), len(second))
    differing = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differing[0]) if len(differing) else shorter
