"""When something is shown again."""


def is_due(every_n_updates: int, before: int, after: int) -> bool:
    """Whether a batch took the policy off version 0, or to a multiple of ``every_n_updates`` or past one; 0: never.

    Args:
        every_n_updates: How often.
        before: The policy's version before the batch.
        after: Its version behind the batch.
    """
    n = every_n_updates
    return n > 0 and after > before and (before == 0 or after // n > before // n)
