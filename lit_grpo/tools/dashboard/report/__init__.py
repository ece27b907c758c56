"""The report: the records in the folders of runs as one HTML file that needs no network."""

from lit_grpo.tools.dashboard.report.folder import RunRecords, read_folder
from lit_grpo.tools.dashboard.report.page import default_path, read_folders, write_report

__all__ = ["RunRecords", "default_path", "read_folder", "read_folders", "write_report"]
