"""ARRoL (arXiv 2603.24840): completions that are predicted to add nothing to their group are stopped early."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

import numpy as np

from lit_grpo.budgets.subsets import nearest_subset
from lit_grpo.limits import Count, Limit
from lit_grpo.plugins import AllGather, Answer, GroupBatch, ObservationPoint, Plugin, RunFacts
from lit_grpo.rollout.generator import StepEvents
from lit_grpo.scheduling.ledger import RequestLedger
from lit_grpo.scheduling.lengths import FORGETTING, Projection, Ridge
from lit_grpo.types import GroupKey, Key, RolloutGroup

LEFT_WHOLE = 8  # one group in so many loses nobody, so that the head can be judged and the bias be measured
MIN_SURVIVORS = 2  # fewer have no advantages
NUM_COLUMNS, NUM_SCALARS = 256, 2  # of features, after their projection; mean log-prob and entropy among them
BETWEEN = 100.0  # rows as which what lies between groups counts: all of it, for a group's balance needs it
NUM_BINS = 20  # of scores from 0 to 1
PRIOR_COUNT = 2.0  # completions as which a bin's own place counts in what is said of it
WINDOW = 128  # groups that quality is taken from
MIN_AUC = 0.6  # from which on the head is followed


@dataclass
class Arrol(Plugin):
    """Stop completions early by the success that is predicted of them (ARRoL, arXiv 2603.24840).

    Once every member of a group has come to ``at`` tokens or ended, ``keep`` of those still decoded go on: the subset
    of that size with which the expected share of successes in the group is nearest to ``positive_share``. The others
    are dropped, and are no members. What has ended stays, and so do two members at least. Nobody is dropped before the
    head is proven, nor ever in one group of eight, chosen by its name. Once it is, completions come to the point
    together, so that nobody goes on who could be dropped.
    """

    role: ClassVar[str] = "which completions are stopped early"
    needs: ClassVar[frozenset[str]] = frozenset({"whole_rollouts", "separate_completions"})
    changes: ClassVar[Mapping[str, str]] = {"whole_rollouts": "drops completions before they end"}
    traits: ClassVar[frozenset[str]] = frozenset({"common"})

    at: Count = 512
    """Number of tokens at which completions are dropped, once all of a group have that many or have ended."""
    keep: Annotated[float, Limit(ge=0, le=1)] = 0.5
    """Fraction of the completions still decoded then that continue, rounded up."""
    positive_share: Annotated[float, Limit(ge=0, le=1)] = 0.5
    """Target fraction of successes in a group after completions were dropped."""

    def check(self, run: RunFacts) -> None:
        if self.at > run.max_tokens - 2:
            raise ValueError(
                f"at is {self.at}, and sampling.max_tokens is {run.max_tokens}: {max(run.max_tokens - 2, 0)} is the "
                "largest that leaves anything to save; give less, as in arrol:at=64."
            )
        if run.num_generations < 3:
            raise ValueError(
                f"it needs groups of 3 or more, of which two stay, and num_generations is {run.num_generations}; give "
                "more, or leave arrol out."
            )

    def setup(self) -> None:
        self.head = QualityHead()
        self._shifts: list[list[float]] = []  # of groups left whole: mean reward, and of those that would have stayed
        self._clear()

    def on_rollout_start(self, ledger: RequestLedger) -> None:
        self._clear()
        self._ledger = ledger

    @property
    def observes(self) -> ObservationPoint:
        """``at``, where completions wait for each other once the head is proven."""
        return ObservationPoint(self.at, barrier=self.head.proven)

    def on_step(self, events: StepEvents) -> Answer | None:
        """Note who has ended or come to the point; drop members of groups of which all have ended or come to it."""
        if not self._members:  # all requests of the rollout are in flight at its first step
            for request in self._ledger.requests:
                self._members.setdefault(request.group, []).append(request.key)
            self._awaited = {group: set(keys) for group, keys in self._members.items()}
        self._ended |= {completion.request.key: completion.num_sampled for completion in events.finished}
        arrived: list[Key] = []
        for each in events.observations:
            if each.num_tokens == self.at:
                keys = cast("Sequence[Key]", each.keys)
                arrived += keys
                for key, row in zip(keys, each.features, strict=True):
                    self._features.setdefault(key, row)
        arrived += [completion.request.key for completion in events.finished]
        dropped: list[Key] = []
        for group in dict.fromkeys(key[:2] for key in arrived):
            awaited = self._awaited.get(group, set())
            awaited.difference_update(arrived)
            if group in self._awaited and not awaited:
                del self._awaited[group]
                dropped += self._decide(group)
        return Answer(drop=dropped) if dropped else None

    def _decide(self, group: GroupKey) -> list[Key]:
        """Return the members of a group that are to be dropped."""
        members, features = sorted(self._members[group]), self._features
        seen = [key for key in members if key in features and np.isfinite(features[key]).all()]
        said = dict(zip(seen, self.head.chances(np.array([features[key] for key in seen])), strict=True))
        stays = np.array([key in self._ended or key not in said for key in members])
        size = max(math.ceil(self.keep * (~stays).sum()), MIN_SURVIVORS - int(stays.sum()))
        if size >= (~stays).sum() or not self.head.has_learned:
            return []
        chances = np.array([said.get(key, self.head.early_chance) for key in members])
        kept = nearest_subset(chances, stays, size, self.positive_share)
        leaving = [key for key, stays_in in zip(members, kept, strict=True) if not stays_in]
        if not self.head.proven or is_left_whole(group):
            self._would_leave[group] = leaving
            return []
        had = {request.key: request.prefix.num_sampled for request in self._ledger.requests} | self._ledger.progress()
        self._dropped |= {key: had[key] for key in leaving}
        return leaving

    def metrics(self, all_gather: AllGather) -> dict[str, float]:
        """Return what the rollout lost, and an estimate of what that saved.

        A dropped completion is taken to have become as long as, in the mean, those that came to the point and went on.
        """
        went_on = [num_tokens for key, num_tokens in self._ended.items() if key in self._features]
        everyone = all_gather((went_on, [*self._dropped.values()]))
        went_on, dropped = (list(itertools.chain(*of_ranks)) for of_ranks in zip(*everyone, strict=True))
        expected = float(np.mean(went_on)) if went_on else 0.0
        return {
            "rollout/pruned_completions": float(len(dropped)),
            "rollout/discarded_tokens": float(sum(dropped)),
            "rollout/pruned_tokens_saved": sum(max(expected - had, 0.0) for had in dropped),
        }

    def on_update_end(self, batch: GroupBatch) -> dict[str, float]:
        """Learn from the rewards of the rollout: what passes is a success; a rollout without that reward is left out.

        All ranks learn the same, from the groups of all of them in the order of their prompts.

        Returns:
            How good the head is, and how far the survivors' mean reward would be off that of their group.
        """
        pruned, features, pass_rule = {key[:2] for key in self._dropped}, self._features, batch.pass_rule
        of_groups: list[tuple[GroupKey, list[tuple[np.ndarray, bool, bool]], list[bool], list[float] | None]] = []
        for group in batch.groups:
            rows, early = [], []
            for rollout in group.fresh:
                key, passed = rollout.completion.request.key, pass_rule.passes(rollout.rewards)
                if rollout.rewards.get(pass_rule.reward) is None:
                    continue
                if key not in features:
                    early.append(passed)
                elif np.isfinite(features[key]).all():
                    rows.append((features[key], passed, group.key not in pruned))
            of_groups.append((group.key, rows, early, self._shift(group)))
        of_groups = sorted(itertools.chain(*batch.all_gather(of_groups)), key=lambda each: each[0])
        seen = [(*row, number) for number, (_, rows, _, _) in enumerate(of_groups) for row in rows]
        early = np.array([passed for _, _, of_group, _ in of_groups for passed in of_group])
        observed, successes, whole, numbers = map(np.array, zip(*seen, strict=True) if seen else ([],) * 4)
        self.head.learn(observed, successes, groups=numbers, whole=whole, early=early)
        self._shifts = [*self._shifts, *(shift for *_, shift in of_groups if shift is not None)][-WINDOW:]
        self._clear()
        means = np.array(self._shifts).reshape(-1, 2).mean(0) if self._shifts else None
        return self.head.metrics() | ({} if means is None else {"pruning/reward_shift": float(means[1] - means[0])})

    def _shift(self, group: RolloutGroup) -> list[float] | None:
        """Return the mean reward of a group that was left whole, and what pruning would have made of it."""
        if (leaving := self._would_leave.get(group.key)) is None:
            return None
        rewards = [rollout.reward for rollout in group.fresh]
        others = [each.reward for each in group.fresh if each.completion.request.key not in leaving]
        is_known = bool(np.isfinite([*rewards, *others]).all())
        return [float(np.mean(rewards)), float(np.mean(others))] if is_known else None

    def state_dict(self) -> dict[str, Any]:
        return {"head": self.head.state_dict(), "shifts": self._shifts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        self._shifts = state["shifts"]

    def _clear(self) -> None:
        self._members: dict[GroupKey, list[Key]] = {}
        self._features: dict[Key, np.ndarray] = {}  # what the policy showed of each completion at the point, shape (D,)
        self._ended: dict[Key, int] = {}  # with so many tokens
        self._awaited: dict[GroupKey, set[Key]] = {}
        self._dropped: dict[Key, int] = {}  # with so many tokens
        self._would_leave: dict[GroupKey, list[Key]] = {}


def is_left_whole(group: GroupKey) -> bool:
    """Return whether a group is one of those that lose nobody: the same in every run."""
    return zlib.crc32(f"{group[0]}/{group[1]}".encode()) % LEFT_WHOLE == 0


# ---- the chance of success, predicted from hidden states midway and fitted online --------------------


class QualityHead:
    """Predicts the chance of success of completions from features at one number of tokens.

    A ridge regression that forgets (that of predicted lengths, :class:`Ridge`) gives scores. Scores fall into
    bins, and a chance is the share of successes in the bin so far, of completions that were scored before they were
    trained on, with a beta prior of the weight of two completions at the bin's middle; chances rise with the score
    (:func:`rising`). Completions that ended before they were observed have a bin of their own.

    ``proven`` is whether chances predicted for the last ``WINDOW`` groups that lost nobody have told successes from
    failures of one group: with an AUC of at least ``MIN_AUC``, and of two standard errors above chance.
    """

    def __init__(self) -> None:
        self.proven = False
        self._projection, self._model = Projection(NUM_COLUMNS, NUM_SCALARS), Ridge(BETWEEN)
        self._bins = np.zeros((NUM_BINS + 1, 2))  # number and successes, forgetting; the last is of early ends
        self._judged = np.empty((0, 3))  # rows of chance, success, number of the group
        self._num_groups = 0

    @property
    def has_learned(self) -> bool:
        return len(self._model.moments) > 0

    @property
    def early_chance(self) -> float:
        """The chance of a completion that ended before it could be observed."""
        return float(self._posterior[-1])

    @property
    def _posterior(self) -> np.ndarray:
        centers = np.append((np.arange(NUM_BINS) + 0.5) / NUM_BINS, 0.5)
        counts = self._bins[:, 0] + PRIOR_COUNT
        shares = (self._bins[:, 1] + PRIOR_COUNT * centers) / counts
        return np.append(rising(shares[:-1], counts[:-1]), shares[-1])

    def chances(self, features: np.ndarray) -> np.ndarray:
        """Return chances of success, shape (n,), for finite ``features``, shape (n, D); 0.5 before it has learned."""
        if not (self.has_learned and len(features)):
            return np.full(len(features), 0.5)
        return self._posterior[self._bins_of(self._projection(features))]

    def learn(
        self, features: np.ndarray, successes: np.ndarray, groups: np.ndarray, whole: np.ndarray, early: np.ndarray
    ) -> None:
        """Take what became of a rollout.

        Args:
            features: Features of completions that were observed, finite, shape (n, D).
            successes: 1 where they succeeded, else 0, shape (n,).
            groups: A number of the group that each is in, from 0, shape (n,).
            whole: Whether the group lost nobody, shape (n,); only then does a row say how good the head is.
            early: Successes of completions that ended before they could be observed, shape (m,).
        """
        self._bins *= FORGETTING
        self._bins[-1] += len(early), early.sum()
        if not len(features):
            return
        x = self._projection(features)
        if self.has_learned:
            bins = self._bins_of(x)
            said = np.column_stack([self._posterior[bins], successes, groups + self._num_groups])
            self._judge(said[whole.astype(bool)])
            np.add.at(self._bins, bins, np.column_stack([np.ones(len(bins)), successes]))
        self._model.learn(x.astype(np.float64), successes.astype(np.float64), groups)
        self._num_groups += int(groups.max()) + 1

    def metrics(self) -> dict[str, float]:
        """Return whether the head is followed, and how good it was on fresh groups of late, where there were any."""
        figures = {"pruning/active": float(self.proven)}
        said, came, groups = self._judged.T
        if len(said):
            figures["pruning/auc"] = within_auc(said, came, groups)[0]
            figures["pruning/calibration_error"] = calibration_error(said, came)
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Return what has been learned as plain values."""
        return {
            "scale": self._projection.scale.tolist(),
            "model": self._model.state_dict(),
            "bins": self._bins.tolist(),
            "judged": self._judged.tolist(),
            "num_groups": self._num_groups,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self._projection.scale = np.array(state["scale"], dtype=np.float64)
        self._model.load_state_dict(state["model"])
        self._bins, self._num_groups = np.array(state["bins"]), state["num_groups"]
        self._judged = np.empty((0, 3))
        self._judge(np.array(state["judged"], dtype=np.float64).reshape(-1, 3))

    def _bins_of(self, x: np.ndarray) -> np.ndarray:
        scores = self._model.predict(x.astype(np.float64))
        return np.clip((scores * NUM_BINS).astype(np.int64), 0, NUM_BINS - 1)

    def _judge(self, rows: np.ndarray) -> None:
        """Add rows of fresh groups, and decide whether the head is followed."""
        judged = np.concatenate([self._judged, rows])
        groups = np.unique(judged[:, 2])
        self._judged = judged[np.isin(judged[:, 2], groups[-WINDOW:])]
        auc, error = within_auc(*self._judged.T)
        self.proven = auc >= max(MIN_AUC, 0.5 + 2 * error)


def rising(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the nearest values that nowhere fall, in weighted squares, all of shape (n,), by pooling neighbors."""
    pools: list[tuple[float, float, int]] = []  # value, weight, and how many it stands for
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        count = 1
        while pools and pools[-1][0] >= value:
            before, its_weight, its_count = pools.pop()
            value = (value * weight + before * its_weight) / (weight + its_weight)
            weight, count = weight + its_weight, count + its_count
        pools.append((value, weight, count))
    return np.repeat([value for value, _, _ in pools], [count for _, _, count in pools])


def within_auc(chances: np.ndarray, successes: np.ndarray, groups: np.ndarray) -> tuple[float, float]:
    """Return how often, of a success and a failure of one group, the success had the larger chance, ties half.

    All have the shape (n,). The second figure is the standard error by which it is off 0.5 by chance (Mann and Whitney
    1947, added up over groups). Without a pair it is 0.5, with an infinite error.
    """
    won = num_pairs = variance = 0.0
    for group in np.unique(groups):
        mine = groups == group
        gaps = chances[mine & (successes > 0)][:, None] - chances[mine & (successes <= 0)]
        won += (gaps > 0).sum() + (gaps == 0).sum() / 2
        num_pairs += gaps.size
        variance += gaps.size * (mine.sum() + 1) / 12
    return (float(won / num_pairs), math.sqrt(variance) / num_pairs) if num_pairs else (0.5, math.inf)


def calibration_error(chances: np.ndarray, successes: np.ndarray) -> float:
    """Return the expected calibration error (Naeini et al. 2015) of chances, by bins; both have the shape (n,)."""
    bins = np.clip((chances * NUM_BINS).astype(np.int64), 0, NUM_BINS - 1)
    return float(np.abs(np.bincount(bins, chances - successes)).sum() / len(chances))


PLUGINS = {"arrol": Arrol()}
