"""Lower bound on the completions a prompt's next round needs, before all rewards of the last round are known."""

from __future__ import annotations

from lit_grpo.plugins import Plugin, ask

MOST_LEFT = 8
"""Completions of a round; what can come of more is seldom certain, and costs time to find out."""


class Foresight:
    """Lower bound on a prompt's next round while some completions of the last round have no reward yet.

    Each of those can pass, fail, or get no reward at all; the fewest that a rule then asks for are certain.

    Args:
        rule: Says how many more a prompt gets (:meth:`lit_grpo.plugins.Plugin.next_round`).
    """

    def __init__(self, rule: Plugin) -> None:
        self._rule = rule
        self._known: dict[tuple[int, int, int, int, int], int] = {}

    def least(self, num_rewarded: int, num_passed: int, num_left: int, num_rounds: int, num_first: int) -> int:
        """Return the fewest more that a prompt gets; the rule's own answer where none are left.

        Args:
            num_rewarded: Completions with a reward.
            num_passed: Number of rewarded completions that passed.
            num_left: Completions whose rewards are to come; of more than ``MOST_LEFT`` nothing is foreseen.
            num_rounds: Rounds that it has had, this one among them.
            num_first: Completions of the first of them.
        """
        if not num_left:
            asked = num_rewarded, num_passed, num_rounds, num_first
            return max(ask(self._rule, "next_round", *asked), 0) if num_rewarded else 0
        if num_left > MOST_LEFT:
            return 0
        key = (num_rewarded, num_passed, num_left, num_rounds, num_first)
        if key not in self._known:
            outcomes = ((0, 0), (1, 1), (1, 0))
            self._known[key] = min(
                self.least(num_rewarded + rewarded, num_passed + passed, num_left - 1, num_rounds, num_first)
                for rewarded, passed in outcomes
            )
        return self._known[key]
