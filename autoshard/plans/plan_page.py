"""The web page of a sharding plan: key figures, charts of its step and modules, and tables of all it decides."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from autoshard.plans.backward_half import (
    SOURCES_TITLE,
    layer_rows,
    source_cells,
    source_labels,
    sources_legend,
    sources_of,
)
from autoshard.plans.expenses import Expenses
from autoshard.plans.html import (
    Fold,
    Part,
    Section,
    cards,
    code_cell,
    document,
    facts_table,
    number_cell,
    table,
    text_cell,
    text_table,
)
from autoshard.plans.module_figures import collectives_figure, modules_figure
from autoshard.plans.plan_data import PlanContents
from autoshard.plans.plan_text import (
    LEGEND,
    TensorRow,
    WorkRow,
    collective_rows,
    hosted_text,
    memory_parts,
    memory_text,
    offloaded_text,
    operator_rows,
    peak_text,
    plan_tensors,
    slower_text,
    summary,
    throughput_text,
)
from autoshard.plans.step_figures import memory_figure, timeline_figure
from autoshard.units import format_bytes, format_seconds

_LONG = 30  # rows of a table that are about a screen: longer ones are folded up


def page(plan: PlanContents, layouts: Sequence[Part] = ()) -> str:
    """Return the page of a plan; `layouts` are a table of other layouts of the step."""
    return document(f"Sharding plan: {plan.mesh}", plan_cards(plan), plan_sections(plan, layouts=layouts))


def plan_cards(plan: PlanContents) -> str:
    """Return the key figures of a plan."""
    replay, sent = plan.step_replay, plan.collectives
    seconds = sum(collective.count * collective.seconds for collective in sent)
    exposed = f"{format_seconds(replay.exposed)} of it without compute beside it" if replay.compute else ""
    of = f"of {format_bytes(plan.capacity)}" if plan.capacity else "the limit is not known"
    phases = dict.fromkeys(choice.phase for choice in plan.choices)
    rate, *used = throughput_text(plan).split(", ")
    figures = [
        ("Predicted step", format_seconds(plan.step_seconds), " and ".join(phases)),
        *([("Throughput", rate, ", ".join(used))] if rate else []),
        ("Peak of one device", format_bytes(plan.memory.peak), of if plan.fits else f"{of}: does not fit"),
        ("Communication", format_seconds(seconds), exposed or "before overlap")
        if sent
        else ("Communication", "none", ""),
        ("Devices", str(plan.mesh.size), str(plan.mesh)),
    ]
    if plan.cost > 0:
        proof = "no plan costs less" if plan.gap < 1e-9 else slower_text(plan) if plan.lower_bound > 0 else ""
        ended = "ended by time" if plan.ended_early else "proved the best" if plan.gap < 1e-9 else "ended by itself"
        figures.append(("Search", ended, f"{proof}; cost {format_seconds(plan.cost)} before overlap"))
    return cards(figures, alarms=("Search",) if plan.ended_early else ())


def plan_sections(plan: PlanContents, prefix: str = "", layouts: Sequence[Part] = ()) -> list[Section]:
    """Return the sections of a plan.

    Args:
        plan: of one step.
        prefix: makes the names of its figures unique in a page of several plans.
        layouts: a table of other layouts of the step, if they were compared.
    """
    changes: list[Part] = [facts_table(levers(plan, is_compared=bool(layouts)))] if plan.choices else []
    work = collective_rows(plan.collectives)
    return [
        Section("Step", [step_bar(plan), *_step_figures(plan, prefix)]),
        Section("Summary", [facts_table(summary(plan))]),
        Section("What would change it", [*changes, *layouts]),
        Section("Memory at the peak", [memory_bar(plan), *saved_by_operator(plan)]),
        Section(SOURCES_TITLE, sources_by_layer(plan)),
        Section("Modules", [*modules_figure(plan, prefix), f'<p class="legend-text">{escape(LEGEND)}</p>']),
        Section("Collectives", [*collectives_figure(plan, prefix), *_work(_COLLECTIVE, work, sized=True)]),
        *tensor_sections(plan),
        Section("Operators", _work(("operator", "phase", "strategy"), operator_rows(plan.choices), sized=False)),
    ]


_COLLECTIVE = ("collective", "axis", "phase")


def as_parts(sections: Sequence[Section]) -> list[Part]:
    """Return sections as parts of another section, with their titles."""
    parts: list[Part] = []
    for section in sections:
        if any(section.parts):
            parts += [f"<h3>{escape(section.title)}</h3>", *section.parts]
    return parts


def step_bar(plan: PlanContents) -> str:
    """Return a bar of the parts that add up to the predicted step, with its legend; empty without a replay."""
    if not plan.step_replay.compute:
        return ""
    expenses = Expenses(plan)
    by_axis = plan.step_replay.exposed_by_axis()
    parts = [("compute", expenses.compute, "var(--forward)")]
    for axis, seconds in by_axis.items():
        parts.append((f"communication over {axis}", seconds, f"var(--placement-{3 + plan.mesh.index(axis) % 5})"))
    parts += [
        ("compute slower beside communication", expenses.slowdown, "var(--alarm)"),
        ("waits for the host, copies", expenses.other, "var(--update)"),
    ]
    # Flex factors are nanoseconds, for below a sum of 1 they leave room. Rounding may leave a part a little below zero.
    shown = [(name, seconds, colour) for name, seconds, colour in parts if seconds > 1e-4 * expenses.step_seconds]
    bar = "".join(
        f'<span style="flex: {1e9 * seconds:.0f}; background: {colour}"></span>' for _, seconds, colour in shown
    )
    legend = "".join(
        f'<span><i style="background: {colour}"></i>{escape(name)} {format_seconds(seconds)}</span>'
        for name, seconds, colour in shown
    )
    return f'<p>The step of {format_seconds(expenses.step_seconds)}</p>\n<div class="bar">{bar}</div>\n' + (
        f'<p class="legend">{legend}</p>'
    )


def _step_figures(plan: PlanContents, prefix: str) -> list[Part]:
    figures: list[Part] = [*memory_figure(plan, prefix), *timeline_figure(plan, prefix)]
    return [*figures, _TRACE] if figures else []


_TRACE = (
    '<p class="legend-text">Every call, with its module: <code>autoshard simulate plan.json --trace step.json</code> '
    'or <code>plan.trace("step.json")</code>, opened in <a href="https://ui.perfetto.dev">Perfetto</a>.</p>'
)


def levers(plan: PlanContents, *, is_compared: bool = False) -> list[tuple[str, str]]:
    """Return what would change a plan: a label, and what it is now with the way to another value.

    Args:
        plan: of one step.
        is_compared: True if standard layouts are listed below.
    """
    compared = "in the table below"
    if not is_compared:
        compared = "autoshard compare --html lists DDP, FSDP2, HSDP and tensor parallelism here, beside this plan"
    expenses, outputs = Expenses(plan), plan.memory.held.get("output", 0)
    waits = ", ".join(
        f"{axis} {format_seconds(seconds)}" for axis, seconds in plan.step_replay.exposed_by_axis().items()
    )
    lines = [
        ("mesh", f"{plan.mesh}; autoshard search finds the best of {plan.mesh.size} devices"),
        ("standard layouts", compared),
        ("other placements", "autoshard why, or plan.why_not(...), finds the nearest plan that has what you ask for"),
        ("communication", f"exposed {waits}; faster links or a larger batch hide more of it" if waits else ""),
        ("recomputation", f"{expenses.rerun} run again; more memory avoids it" if plan.recomputed else ""),
        ("moves to the host", f"{offloaded_text(plan)}; more memory avoids them" if plan.offloaded else ""),
        ("optimizer on the host", f"{hosted_text(plan)}; more memory avoids it" if plan.hosted else ""),
        (
            "outputs",
            f"{format_bytes(outputs)} at the peak; output_placements says how they come back" if outputs else "",
        ),
        ("search", "the time limit ended it: a longer one may find a faster plan" if plan.ended_early else ""),
    ]
    return [(label, text) for label, text in lines if text]


def memory_bar(plan: PlanContents) -> str:
    """Return a bar of the bytes of one device by kind at the peak, with its legend, and the largest tensors then."""
    parts = memory_parts(plan.memory)
    if not parts:
        return ""
    # Shares of the bar are the bytes themselves, as flex factors: the browser does the division.
    bar = "".join(f'<span class="{_class(name)}" style="flex: {amount}"></span>' for name, amount in parts.items())
    legend = "".join(
        f'<span><i class="{_class(name)}"></i>{name} {format_bytes(amount)}</span>' for name, amount in parts.items()
    )
    # The text of the peak goes on with the largest tensors, which are a table here.
    texts = (memory_text(plan), peak_text(plan.memory).partition(";")[0])
    lines = "".join(f"<p>{escape(text)}</p>" for text in texts if text)
    rows = [
        [code_cell(tensor.name), text_cell(tensor.kind), number_cell(format_bytes(tensor.bytes))]
        for tensor in plan.memory.largest
    ]
    largest = table((("largest then", False), ("kind", False), ("bytes", True)), rows) if rows else ""
    return f'{lines}\n<div class="bar">{bar}</div>\n<p class="legend">{legend}</p>\n{largest}'


def saved_by_operator(plan: PlanContents) -> list[Part]:
    """Return a table of the activations that are saved at the peak, by module and operator, with the model's lines."""
    rows = [
        [
            code_cell(saved.module or "(root)"),
            code_cell(saved.operator),
            code_cell(saved.line),
            number_cell(str(saved.count)),
            number_cell(format_bytes(saved.bytes)),
            number_cell(format_bytes(saved.count * saved.bytes)),
        ]
        for saved in plan.memory.saved
    ]
    texts = ("saved activations of", "operator", "line")
    head = [*((text, False) for text in texts), ("count", True), ("each", True), ("together", True)]
    return [Fold(f"Saved activations by operator: {len(rows)} rows", [table(head, rows)])] if rows else []


def sources_by_layer(plan: PlanContents) -> list[Part]:
    """Return a table of what the backward half has from where: a row for each layer, equal ones in one."""
    rows = layer_rows(sources_of([plan]))
    texts, numbers = source_labels(rows)
    legend = f'<p class="legend-text">{escape(sources_legend(rows))}</p>'
    return [text_table((*texts, *numbers), source_cells(rows), texts), legend] if rows else []


def _class(kind: str) -> str:
    return f"kind-{kind.split()[0]}"


def tensor_sections(plan: PlanContents) -> list[Section]:
    """Return the placements of parameters, inputs and outputs."""
    return [Section(f"{kind.capitalize()}s", [_tensors(rows, plan)]) for kind, rows in plan_tensors(plan).items()]


def _tensors(rows: Sequence[TensorRow], plan: PlanContents) -> str:
    # A column in which every cell would be empty is left out.
    shaped, gathered = any(row.shape is not None for row in rows), any(row.gathered for row in rows)
    head = [
        ("name", False),
        ("count", True),
        *([("shape", False)] if shaped else []),
        *((axis, False) for axis in plan.mesh.names),
        *([("gathered", False)] if gathered else []),
    ]
    body = []
    for row in rows:
        shape = [text_cell("x".join(map(str, row.shape)) if row.shape else "scalar")] if shaped else []
        how = [text_cell(row.gathered)] if gathered else []
        body.append([code_cell(row.name), number_cell(str(row.count)), *shape, *map(_placement, row.placements), *how])
    return table(head, body)


def _work(labels: Sequence[str], rows: Sequence[WorkRow], sized: bool) -> list[Part]:
    """Return a table of operators or collectives, folded up where it is long."""
    if not rows:
        return []
    numbers = ("count", "bytes", "time") if sized else ("count", "time")
    head = [*((label, False) for label in (*labels, "module")), *((label, True) for label in numbers)]
    body = []
    for row in rows:
        size = [number_cell(format_bytes(row.bytes))] if sized else []
        texts = map(code_cell, (*row.labels, row.module or "(root)"))
        body.append([*texts, number_cell(str(row.count)), *size, number_cell(format_seconds(row.seconds))])
    content = table(head, body)
    return [content if len(rows) <= _LONG else Fold(f"{len(rows)} rows", [content])]


def _placement(text: str) -> str:
    # The colours of `plan_text`: sharded and partial placements stand out of replicated ones.
    return code_cell(text, {"S": "sharded", "P": "partial"}.get(text[0], ""))
