"""The report of a sharding plan: key figures, charts of its step and modules, and tables of all decisions."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.plans.backward_half import SOURCES_TITLE, layer_rows, sources_of, sources_parts
from autoshard.plans.expenses import Expenses
from autoshard.plans.module_charts import collectives_chart, modules_chart
from autoshard.plans.plan_data import PlanContents
from autoshard.plans.plan_summary import KIND_NAMES, hosted_text, memory_parts, offloaded_text, summary
from autoshard.plans.plan_tables import collective_rows, collective_table, operator_rows, operator_table, tensor_table
from autoshard.plans.step_charts import memory_chart, timeline_chart
from autoshard.report import Bar, Facts, Note, Part, Report, Section, Share, Table, names, numbers, texts
from autoshard.units import format_bytes, format_seconds

LEGEND = (
    "R: replicated; S(d): dim d sharded; S(d,f=k): each of k equal parts of dim d sharded; P(op): yet to be reduced."
)
_TRACE = (
    'Every call, with its module: autoshard simulate plan.json --trace step.json or plan.trace("step.json"), opened in '
    "Perfetto"
)


def plan_report(plan: PlanContents, prefix: str = "", *, is_compared: bool = False) -> Report:
    """Return the report of a plan.

    Args:
        plan: a plan of one step.
        prefix: makes the names of its charts unique in a report of several plans.
        is_compared: True if the report lists standard layouts beside the plan.
    """
    sections = (
        Section.detail("Step", _step(plan, prefix)),
        Section.detail("What would change it", [_levers(plan, is_compared)] if plan.choices else []),
        Section.detail("Memory at the peak", _memory(plan)),
        Section.detail("Modules", modules_chart(plan, prefix)),
        *tensor_sections(plan),
        Section("Collectives", tuple(_collectives(plan, prefix))),
        sources_section([plan]),
        Section.detail("Operators", [operator_table(operator_rows(plan.choices))] if plan.choices else []),
    )
    return Report.of(f"ShardingPlan on {plan.mesh}", (summary(plan), *sections))


def _step(plan: PlanContents, prefix: str) -> Iterator[Part]:
    """Yield the bar of the step and its charts; nothing if the calls of the step are unknown."""
    if plan.step_replay.compute:
        yield Note(f"The step of {format_seconds(plan.step_seconds)}")
        yield _step_bar(plan)
        yield from memory_chart(plan, prefix)
        yield timeline_chart(plan, prefix)
        yield Note(_TRACE, "dim", "https://ui.perfetto.dev")


def _step_bar(plan: PlanContents) -> Bar:
    """Return a bar of the parts of the predicted step."""
    expenses = Expenses(plan)
    parts = [("compute", expenses.compute, "forward")]
    for axis, seconds in plan.step_replay.exposed_by_axis().items():
        parts.append((f"communication over {axis}", seconds, f"placement-{3 + plan.mesh.index(axis) % 5}"))
    parts += [
        ("compute slower beside communication", expenses.slowdown, "alarm"),
        ("waits for the host, copies", expenses.other, "update"),
    ]
    # Rounding may leave a part slightly below zero.
    shown = (part for part in parts if part[1] > 1e-4 * expenses.step_seconds)
    return Bar(tuple(Share(name, seconds, format_seconds(seconds), colour) for name, seconds, colour in shown))


def _levers(plan: PlanContents, is_compared: bool) -> Facts:
    """Return what would change a plan: its current settings, and how to change them."""
    compared = "listed above"
    if not is_compared:
        compared = "autoshard compare --html lists DDP, FSDP2, HSDP and tensor parallelism, beside this plan"
    rerun, outputs = Expenses(plan).rerun, plan.memory.held.get("output", 0)
    waits = ", ".join(
        f"{axis} {format_seconds(seconds)}" for axis, seconds in plan.step_replay.exposed_by_axis().items()
    )
    return Facts.of(
        [
            ("mesh", f"{plan.mesh}; autoshard search finds the best of {plan.mesh.size} devices"),
            ("standard layouts", compared),
            (
                "other placements",
                "autoshard why, or plan.why_not(...), finds the nearest plan that has what you ask for",
            ),
            ("communication", f"exposed {waits}; faster links or a larger batch hide more of it" if waits else ""),
            ("recomputation", f"{rerun} run again; more memory avoids it" if plan.recomputed else ""),
            ("moves to the host", f"{offloaded_text(plan)}; more memory avoids them" if plan.offloaded else ""),
            ("optimizer on the host", f"{hosted_text(plan)}; more memory avoids it" if plan.hosted else ""),
            (
                "outputs",
                f"{format_bytes(outputs)} at the peak; output_placements says how they come back" if outputs else "",
            ),
            ("search", "the time limit ended it: a longer one may find a faster plan" if plan.ended_early else ""),
        ]
    )


def memory_bar(plan: PlanContents) -> Bar:
    """Return a bar of one device's bytes at the peak, by kind."""
    colours = {name: kind for kind, name in KIND_NAMES.items()}
    parts = memory_parts(plan.memory).items()
    return Bar(tuple(Share(name, held, format_bytes(held), colours.get(name, "saved")) for name, held in parts))


def _memory(plan: PlanContents) -> Iterator[Part]:
    """Yield one device's bytes at the peak: by kind, the largest tensors, and saved tensors by operator."""
    if memory_parts(plan.memory):
        yield memory_bar(plan)
    largest = [(tensor.name, tensor.kind, format_bytes(tensor.bytes)) for tensor in plan.memory.largest]
    if largest:
        yield Table.of((*names("largest then"), *texts("kind"), *numbers("bytes")), largest)
    saved = [
        (
            one.module or "(root)",
            one.operator,
            one.line,
            str(one.count),
            format_bytes(one.bytes),
            format_bytes(one.count * one.bytes),
        )
        for one in plan.memory.saved
    ]
    if saved:
        columns = (*names("saved activations of", "operator", "line"), *numbers("count", "each", "together"))
        title = f"Saved activations by operator: {len(saved)} rows"
        yield Section.detail(title, [Table.of(columns, saved)], is_folded=True)


def tensor_sections(plan: PlanContents) -> Iterator[Section]:
    """Yield the placements of parameters and buffers, of inputs and of outputs."""
    axes = plan.mesh.names
    parameters = tensor_table(axes, plan.placements, plan.shapes, plan.gathered)
    tables = {
        "Parameters": parameters,
        "Inputs": tensor_table(axes, plan.input_placements, {}),
        "Outputs": tensor_table(axes, plan.output_placements, {}),
    }
    for title, table in tables.items():
        if table.rows:
            # The letters are explained once.
            yield Section(title, (table, Note(LEGEND, "dim")) if table is parameters else (table,))


def _collectives(plan: PlanContents, prefix: str) -> Iterator[Part]:
    rows = collective_rows(plan.collectives)
    if rows:
        yield collectives_chart(plan.mesh, rows, prefix)
        yield collective_table(rows)


def sources_section(plans: list[PlanContents]) -> Section:
    """Return the sources of values that the backward half of a step, or of pipeline stages, reads, layer by layer.

    For the stages of a pipeline, it is per microbatch. Text omits the section if no plan has a memory limit: then a
    device keeps everything.
    """
    limited = any(plan.options.get("memory_limit") or plan.recomputed or plan.offloaded for plan in plans)
    title = f"{SOURCES_TITLE}, for one microbatch" if len(plans) > 1 else SOURCES_TITLE
    return Section(title, sources_parts(layer_rows(sources_of(plans))), is_detail=not limited)
