"""Write docs/prices.md from the presets: python docs/prices.py [--check]

Every figure of a preset with its value and its source, as the JSON files have them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from autoshard.cluster import Cluster, Device, Link
from autoshard.cluster.measurements import BYTES, FLOPS, INTENSITY, Curve

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "prices.md"
HEAD = """\
# What the presets' devices reach

Written by `python docs/prices.py` from `autoshard/cluster/presets`. A preset prices a kernel and a collective by what
devices were measured to reach, not by the data sheet: a curve over the amount of work, such as `autoshard.calibrate`
measures. No figure is fitted to the time of a step. Where no measurement was found, the source says so, and what was
taken in its place. Measure your own machine with `autoshard calibrate` for prices to count on.

How the curves are used:

* **Products, convolutions, attention** take the longest of three: the seconds of their operations, those of moving
  their bytes, and those of operators with as few operations for every byte. The last is where narrow products are
  slower (in 16 bits a product has at most as many as its smallest size), and attention over short sequences (a quarter
  of the length under a causal mask). A causal mask that the kernel is told of halves the operations of attention.
  A loss in pieces takes the seconds of the bytes besides that it writes and reads between its products.
* **Everything else** takes the seconds of the bytes that it reads and writes; those of the smallest amount are what any
  kernel takes.
* **Programs**: the host issues one call after the other, and the device waits for it where calls take longer than
  kernels (`dispatch`). With `compile=True`, chains of pointwise operators, and reductions of what they make, are one
  kernel: it reads what comes from outside and writes what is used outside.
* **Collectives**: seconds by the bytes that one device sends over its link, of S bytes that are reduced round a ring of
  n devices 2 S (n - 1) / n. Bytes by seconds are the bus bandwidth of nccl-tests. Longer rings wait for the latency of
  every further hop. Between hosts the amounts are those of one port: a group with several devices on a host uses the
  ports of all.
* **Both at once**: a second of communication behind compute takes `contention` seconds from the compute. A collective
  that nothing is computed behind is waited for in full, as the all-reduces of tensor parallelism are.
* **The optimizer** reads the gradient, reads and writes the parameter and its state once, as `fused=True` does:
  `plan.update_seconds`, which is no part of `plan.step_seconds`.
"""
_UNITS = {
    FLOPS: ("TFLOP/s by operations", 1e12),
    BYTES: ("GB/s by bytes", 1e9),
    INTENSITY: ("TFLOP/s by flops/byte", 1e12),
}


def main() -> int:
    """Write the page, or, with --check, tell whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the page is not up to date")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text, "utf-8")
    elif PAGE.read_text("utf-8") != text:
        sys.stderr.write("docs/prices.md is not up to date: python docs/prices.py\n")
        return 1
    return 0


def page() -> str:
    """The text of the page."""
    return HEAD + "".join(f"\n{section(Cluster.preset(name))}" for name in Cluster.presets() if name != "cpu")


def section(cluster: Cluster) -> str:
    """The figures of one preset, as a table."""
    lines = [f"## {cluster.name}", "", cluster.source + ".", "", "| figure | value | source |", "|---|---|---|"]
    titles: dict[tuple[str, str], list[str]] = {}
    for figure, value, source in rows(cluster):
        titles.setdefault((value, source), []).append(figure)
    for (value, source), figures in titles.items():
        lines.append(f"| {'; '.join(figures)} | {value} | {source} |")
    return "\n".join(lines) + "\n"


def rows(cluster: Cluster) -> Iterator[tuple[str, str, str]]:
    """Figure, value and source of everything that a preset says."""
    yield from _device_rows(cluster.device)
    yield from _link_rows("inside a host", cluster.inside)
    yield from _link_rows("between hosts", cluster.between)
    yield "contention", f"{cluster.contention:g}", cluster.sources["contention"]


def _device_rows(device: Device) -> Iterator[tuple[str, str, str]]:
    sources = device.sources
    yield "memory", f"{device.memory / 1e9:g} GB", sources["memory"]
    peaks = ", ".join(f"{name} {rate / 1e12:g}" for name, rate in device.peak_flops.items())
    yield "data sheet, TFLOP/s", peaks, sources["peak_flops"]
    yield "data sheet, memory", f"{device.memory_bandwidth / 1e9:g} GB/s", sources["memory_bandwidth"]
    yield "smallest kernel", _micro(device.kernel_overhead), sources["kernel_overhead"]
    yield "link to the host", f"{device.host_bandwidth / 1e9:g} GB/s each way", sources["host_bandwidth"]
    if "host_memory_bandwidth" in sources:
        rate = f"{device.host_memory_bandwidth / 1e9:g} GB/s of a device's share"
        yield "memory of the host", rate, sources["host_memory_bandwidth"]
    for name, title in (("dispatch", "host, eager"), ("compiled_dispatch", "host, compiled")):
        own = getattr(device, name)
        value = f"kernel {_micro(own.kernel)}, view {_micro(own.view)}, collective {_micro(own.collective)}"
        yield title, value, sources[name]
    for (operator, dtype, unit), curve in device.operators.items():
        title, scale = _UNITS[unit]
        what = "memory-bound" if operator == "add" else operator
        yield f"{what}, {dtype}: {title}", _points(curve, scale, unit == INTENSITY), curve.source


def _link_rows(where: str, link: Link) -> Iterator[tuple[str, str, str]]:
    yield f"{where}: reached by rings", f"{link.bandwidth / 1e9:g} GB/s", link.sources["bandwidth"]
    yield f"{where}: latency of a hop", _micro(link.latency), link.sources["latency"]
    for kind, known in link.collectives.items():
        title = f"{where}: {kind.replace('_', '-')}, {known.size} devices, GB/s by bytes sent"
        yield title, _points(known.curve, 1e9), known.curve.source


def _points(curve: Curve, scale: float, of_one: bool = False) -> str:
    """The rates of a curve at its amounts; `of_one`: its seconds are those of one byte."""
    return ", ".join(
        f"{rate / scale:.4g} at {_amount(amount, of_one)}"
        for amount, rate in zip(curve.amounts, curve.rates, strict=True)
    )


def _amount(amount: float, plain: bool) -> str:
    return f"{amount:.4g}" if plain else f"{amount:.2e}".replace("e+0", "e").replace("e+", "e")


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:g} us"


if __name__ == "__main__":
    sys.exit(main())
