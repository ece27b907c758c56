"""Distribution of prompts over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread(work: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Deal prompts to ranks, equally many to each, so that what ranks have to do differs little.

    The largest goes first, each to the rank with the least to do that has room (Graham 1969, longest processing time
    first). Then the rank with the most exchanges a prompt with another as long as that brings the two closer than any
    other exchange of theirs and lessens the most. Where no prompt is more work than another, ranks get them in order.

    Args:
        work: What each prompt is expected to take, in any unit; a multiple of ``num_ranks`` many, perhaps none.
        num_ranks: Number of ranks to deal to.

    Returns:
        The places of each rank's prompts in ``work``, ascending.
    """
    work_N = np.asarray(work, dtype=np.float64)
    each = len(work_N) // num_ranks
    if not each or np.ptp(work_N) == 0:
        return np.arange(len(work_N)).reshape(num_ranks, each).tolist()
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    sums_W = np.zeros(num_ranks)
    for place in np.argsort(-work_N, kind="stable").tolist():
        open_W = [len(places) < each for places in dealt]
        rank = int(np.where(open_W, sums_W, np.inf).argmin())
        dealt[rank].append(place)
        sums_W[rank] += work_N[place]
    while _exchange(work_N, dealt, sums_W):
        pass
    return [sorted(places) for places in dealt]


def _exchange(work_N: np.ndarray, dealt: list[list[int]], sums_W: np.ndarray) -> bool:
    """Lessen what the rank with the most has to do, if an exchange with another does; say whether."""
    most = int(sums_W.argmax())
    for other in np.argsort(sums_W, kind="stable").tolist()[:-1]:
        gap = sums_W[most] - sums_W[other]
        less_PP = work_N[dealt[most]][:, None] - work_N[dealt[other]]
        off_PP = np.abs(less_PP - gap / 2)
        mine, theirs = np.unravel_index(off_PP.argmin(), off_PP.shape)
        less = less_PP[mine, theirs]
        if 1e-9 * sums_W[most] < less < gap * (1 - 1e-9):
            dealt[most][mine], dealt[other][theirs] = dealt[other][theirs], dealt[most][mine]
            sums_W[most] -= less
            sums_W[other] += less
            return True
    return False
