"""Whether a run can work: a check-up of its policy, data, rewards, generator, memory and disk before it begins."""

from lit_grpo.tools.doctor.checkup import CheckUp, Examined
from lit_grpo.tools.doctor.report import Finding, Report, Verdict

__all__ = ["CheckUp", "Examined", "Finding", "Report", "Verdict"]
