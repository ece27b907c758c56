import torch

from lit_grpo.memory import PeakMemory


def test_peak_is_that_since_the_last_reset() -> None:
    peak = PeakMemory(torch.device("cpu"))
    peak.reset()
    idle = peak.peak_gib()
    block = torch.ones(64 * 2**20)  # 256 MiB
    del block
    assert 0.2 < peak.peak_gib() - idle < 0.5
    peak.reset()
    assert peak.peak_gib() - idle < 0.1
