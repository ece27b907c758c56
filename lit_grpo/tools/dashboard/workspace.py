"""W&B's view of the boards: a workspace with our sections and panels."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lit_grpo.tools.dashboard.specification import Panel, sections

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.workspaces import Workspace

STEP = "trainer/global_step"
"""The metric that counts W&B's rows, logged by Lightning: updates."""


def make_workspace(entity: str, project: str, name: str = "lit_grpo") -> Workspace:
    """Make a workspace with our sections; its ``save`` sends it to W&B.

    Raises:
        ModuleNotFoundError: wandb-workspaces is not installed.
    """
    from wandb_workspaces.workspaces import Section, Workspace

    views = [
        Section(name=section.title, panels=[_plot(panel) for panel in section.panels], is_open=number < 3)
        for number, section in enumerate(sections())
    ]
    return Workspace(entity=entity, project=project, name=name, sections=views)


def _plot(panel: Panel) -> LinePlot:
    from wandb_workspaces.reports.v2 import LinePlot

    families = [name for name in panel.metrics if "*" in name]
    patterns = "|".join(re.escape(name).replace(r"\*", ".*") for name in panel.metrics)
    return LinePlot(
        title=panel.title,
        x=STEP,
        y=[] if families else list(panel.metrics),
        metric_regex=f"^({patterns})$" if families else None,
        plot_type="stacked-area" if panel.stacked else "line",
    )
