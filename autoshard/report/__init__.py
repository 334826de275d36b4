"""Plans and clusters for the eye: on a terminal, and as a web page."""

from __future__ import annotations

from autoshard.report.cluster_tables import cluster_table, ranks_table
from autoshard.report.html import page
from autoshard.report.plan_console import explanation_table, plan_table

__all__ = ["cluster_table", "explanation_table", "page", "plan_table", "ranks_table"]
