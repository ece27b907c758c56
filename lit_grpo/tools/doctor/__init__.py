"""A check-up of a run before it begins: policy, data, rewards, generator, memory and disk."""

from lit_grpo.tools.doctor.checkup import CheckUp, Examined
from lit_grpo.tools.doctor.report import CheckResult, Report, Verdict

__all__ = ["CheckResult", "CheckUp", "Examined", "Report", "Verdict"]
