"""Decision when something that is shown every few updates is due."""


def is_due(every_n_updates: int, before: int, after: int) -> bool:
    """Return whether a batch made the first update, or reached or passed a multiple of ``every_n_updates``.

    Args:
        every_n_updates: The number of updates from one time to the next; 0 means never.
        before: The policy's version before the batch.
        after: The policy's version after the batch.
    """
    n = every_n_updates
    return n > 0 and after > before and (before == 0 or after // n > before // n)
