"""Each claim measured beside a peer: ``python -m benchmarks.NAME``."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as ``python -m lit_grpo`` does; before numpy is imported
