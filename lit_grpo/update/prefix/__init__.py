"""One computation of a prompt for all of its completions."""

from lit_grpo.update.prefix.sharing import shared_prefixes
from lit_grpo.update.prefix.support import prefix_refusal

__all__ = ["prefix_refusal", "shared_prefixes"]
