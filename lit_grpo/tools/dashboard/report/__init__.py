"""The report: the records in a run's folder as one HTML file that needs no network."""

from lit_grpo.tools.dashboard.report.folder import RunRecords, read_folder
from lit_grpo.tools.dashboard.report.page import write_report

__all__ = ["RunRecords", "read_folder", "write_report"]
