"""The key facts of a plan, and their texts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

from autoshard.memory.footprint import Memory
from autoshard.plans.plan_data import PlanContents
from autoshard.report import Fact, Facts
from autoshard.units import format_bytes, format_seconds

_MOST_LISTED = 4  # recomputed layers, or operators

# Kind of an allocation -> its displayed name.
KIND_NAMES = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "buffer": "buffers",
    "input": "inputs",
    "output": "outputs",
    "saved": "saved activations",
    "gathered": "gathered copies",
    "communication": "communication",
    "temporary": "temporaries",
}


def summary(plan: PlanContents) -> Facts:
    """Return the key facts of a plan."""
    subject = dict(plan.subject)
    made = made_text(subject.pop("made on", ""), plan.versions)
    on = f" on cluster {plan.cluster}" if plan.cluster else ""
    return Facts.of(
        [
            *subject.items(),
            Fact("mesh", str(plan.mesh), f"{plan.mesh.size} devices{on}", is_key=True),
            Fact("predicted step", format_seconds(plan.step_seconds), _step_note(plan), is_key=True),
            _throughput(plan),
            ("optimizer's update", format_seconds(plan.update_seconds) if plan.update_seconds else ""),
            ("shares", f"{shares_text(plan)}; memory is that of equal shares" if plan.shares else ""),
            memory_fact(plan),
            ("peak", peak_text(plan.memory)),
            _search(plan),
            ("made on", made if plan.subject else ""),
            ("planned in", ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in plan.timings.items())),
            ("recomputed", recomputed_text(plan)),
            ("moved to the host", offloaded_text(plan)),
            ("optimizer on the host", hosted_text(plan)),
            ("hints", ", ".join(f"{hint}: {pinned}" for hint, pinned in plan.hints.items())),
        ]
    )


def _step_note(plan: PlanContents) -> str:
    """Return `"forward and backward; 687 collectives taking 156 ms before overlap, 30 ms exposed"`."""
    phases = " and ".join(dict.fromkeys(choice.phase for choice in plan.choices))
    sent = "no collectives"
    if plan.collectives:
        count = sum(collective.count for collective in plan.collectives)
        seconds = sum(collective.count * collective.seconds for collective in plan.collectives)
        exposed = f", {format_seconds(plan.step_replay.exposed)} exposed" if plan.step_replay.compute else ""
        sent = f"{count} collectives taking {format_seconds(seconds)} before overlap{exposed}"
    return "; ".join(filter(None, (phases, sent)))


def _throughput(plan: PlanContents) -> Fact:
    """Return tokens, or samples, per second, and the utilization; a fact without a value if unknown."""
    rates = ((plan.tokens_per_second, "tokens"), (plan.samples_per_second, "samples"))
    known = [f"{rate:,.0f} {name} per second" for rate, name in rates if rate]
    used = f"{plan.utilization:.1%} of the devices' peak rate, MFU" if plan.utilization else ""
    return Fact("throughput", known[0], used, is_key=True) if known else Fact("throughput", used, is_key=True)


def memory_fact(plan: PlanContents) -> Fact:
    """Return the peak and the capacity, with the parts of the peak."""
    parts = ", ".join(f"{name} {format_bytes(amount)}" for name, amount in memory_parts(plan.memory).items())
    of = f" of {format_bytes(plan.capacity)}" if plan.capacity else ""
    short = "" if plan.fits else ": does not fit"
    value = f"peak {format_bytes(plan.memory.peak)}{of}{short}"
    return Fact("memory per device", value, parts, is_key=True, is_alarm=not plan.fits)


def _search(plan: PlanContents) -> Fact:
    """Return the gap to the best plan, and the method of the search."""
    method = plan.method or "none"
    # A model on one device, or without operators that communicate, has no decisions.
    if plan.cost <= 0:
        return Fact("search", "nothing to choose", method)
    bound = f"{method}, cost {format_seconds(plan.cost)}, lower bound {format_seconds(plan.lower_bound)}"
    proof = "the best plan" if plan.gap < 1e-9 else slower_text(plan) if plan.lower_bound > 0 else "no proof"
    return Fact("search", proof, bound, is_key=True, is_alarm=plan.ended_early)


def made_text(date: str, versions: Mapping[str, str]) -> str:
    """Return `"2026-11-27 with autoshard 0.2.0, torch 2.13.0"`."""
    return " with ".join(filter(None, (date, ", ".join(f"{name} {version}" for name, version in versions.items()))))


def shares_text(plan: PlanContents) -> str:
    """Return `"39 of 64 rows on 8 of dp, 25 on 8"`; empty for equal shares."""
    texts = []
    for axis, shares in plan.shares.items():
        (first, ranks), *later_runs = [(share, len(list(run))) for share, run in itertools.groupby(shares)]
        texts.append(f"{first} of {sum(shares)} {'parts' if plan.parts else 'rows'} on {ranks} of {axis}")
        texts += [f"{share} on {count}" for share, count in later_runs]
    return ", ".join(texts)


def memory_parts(memory: Memory) -> dict[str, int]:
    """Return the bytes held at the moment of the peak by kind; totals of the step if that moment is unknown."""
    if memory.held:
        return {KIND_NAMES[kind]: amount for kind, amount in memory.held.items()}
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "buffers": memory.buffers,
        "activations": memory.activations,
    }
    return {name: amount for name, amount in parts.items() if amount}


def peak_text(memory: Memory) -> str:
    """Return the moment of the peak, and the largest tensors then; empty if unknown."""
    if not memory.phase:
        return ""
    where = "" if memory.phase == "optimizer" else f" of {memory.module or 'the root module'}, {memory.operator}"
    # Equal names share an entry with a count: the largest tensors are often the same activation of every layer.
    sums: dict[str, list[int]] = {}
    for tensor in memory.largest:
        sums.setdefault(f"{tensor.name} ({tensor.kind})", []).append(tensor.bytes)
    largest = ", ".join(
        f"{name}{f' x {len(sizes)}' if len(sizes) > 1 else ''} {format_bytes(sum(sizes))}"
        for name, sizes in sums.items()
    )
    return f"in the {memory.phase}{where}; largest then: {largest}"


def recomputed_text(plan: PlanContents) -> str:
    """Return what is recomputed: `"32 layers: ..."`, or `"96 operators: 32 of aten.silu, ..."` for chosen operators."""
    operators = {decision.node: decision for decision in plan.choices}
    decisions = [operators[name] for name in plan.recomputed if name in operators]
    if decisions:
        # Without views, which take no time and would be the majority.
        names = Counter(decision.operator for decision in decisions if decision.seconds)
        listed = ", ".join(f"{count} of {name}" for name, count in names.most_common(_MOST_LISTED))
        more = ", ..." if len(names) > _MOST_LISTED else ""
        return f"{names.total()} operators: {listed}{more}" if names else "views"
    layers = plan.recomputed
    # A deep model recomputes dozens of layers: their names would fill the screen.
    if len(layers) <= _MOST_LISTED:
        return ", ".join(layers)
    return f"{len(layers)} layers: {layers[0]}, {layers[1]}, ..., {layers[-1]}"


def offloaded_text(plan: PlanContents) -> str:
    """Return `"64 tensors, 12.0 GiB of the host of a device"`; empty if nothing is moved."""
    tensors = "1 tensor" if len(plan.offloaded) == 1 else f"{len(plan.offloaded)} tensors"
    moved = plan.memory.host - plan.memory.host_optimizer
    return f"{tensors}, {format_bytes(moved)} of the host of a device" if plan.offloaded else ""


def hosted_text(plan: PlanContents) -> str:
    """Return `"that of 64 parameters, 12.0 GiB of the host of a device, updated in 0.2 s"`; empty if there are none."""
    if not plan.hosted:
        return ""
    parameters = "1 parameter" if len(plan.hosted) == 1 else f"{len(plan.hosted)} parameters"
    held = format_bytes(plan.memory.host_optimizer)
    return (
        f"that of {parameters}, {held} of the host of a device, updated in {format_seconds(plan.host_update_seconds)}"
    )


def slower_text(plan: PlanContents) -> str:
    """Return `"may be up to 15 % slower than the best"`, from cost and lower bound."""
    return f"may be up to {100 * (plan.cost / plan.lower_bound - 1):.2g} % slower than the best"
