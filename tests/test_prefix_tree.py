"""The tree of common prefixes, against sets of prefixes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lit_grpo.trajectory import Branch, prefix_tree


def arrays(*sequences: list[int]) -> list[np.ndarray]:
    return [np.array(sequence, dtype=np.int64) for sequence in sequences]


def test_a_branch_is_what_sequences_have_in_common() -> None:
    branches = prefix_tree(arrays([5, 6, 7], [5, 6, 8, 9], [4], []))
    assert sorted(branches, key=lambda branch: (branch.begin, branch.members)) == [
        Branch(None, 0, 2, (0, 1)),
        Branch(None, 0, 1, (2,)),
        Branch(branches.index(Branch(None, 0, 2, (0, 1))), 2, 3, (0,)),
        Branch(branches.index(Branch(None, 0, 2, (0, 1))), 2, 4, (1,)),
    ]


@pytest.mark.parametrize("least", [1, 3])
@pytest.mark.parametrize("seed", range(30))
def test_a_tree_of_random_sequences(seed: int, least: int) -> None:
    rng = random.Random(seed)
    sequences = [[rng.randint(0, 1) for _ in range(rng.randint(0, 9))] for _ in range(rng.randint(0, 12))]
    branches = prefix_tree(arrays(*sequences), least)
    for number, sequence in enumerate(sequences):
        path = [place for place, branch in enumerate(branches) if number in branch.members]
        assert [branches[place].parent for place in path] == [None, *path][: len(path)]
        parts = [branches[place] for place in path]
        assert [token for branch in parts for token in sequence[branch.begin : branch.end]] == sequence
    for branch in branches:
        texts = {tuple(sequences[member][: branch.end]) for member in branch.members}
        assert len(texts) == 1 and branch.end - branch.begin >= (least if len(branch.members) > 1 else 1)
    for number in range(len(branches)):  # depth-first: what descends from a branch follows it
        below = [place for place, other in enumerate(branches) if is_below(branches, other, number)]
        assert below == list(range(number + 1, number + 1 + len(below)))
    if least == 1:
        distinct = {tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))}
        assert sum(branch.end - branch.begin for branch in branches) == len(distinct)


def is_below(branches: list[Branch], branch: Branch, above: int) -> bool:
    while branch.parent is not None:
        if branch.parent == above:
            return True
        branch = branches[branch.parent]
    return False
