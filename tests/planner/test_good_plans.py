"""Plans of real models at real width, found without hints: what a person who knows would have done, or better.

The tests look at placements, at the shapes that one rank computes with, and at the collectives of the programs.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from autoshard.capture.joint import capture
from autoshard.cluster.cluster import Cluster
from autoshard.planner.planning_problem import Constraints
from autoshard.plans.plan_data import Collective
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.spec import is_shard, shard_placement
from benchmarks import architectures
from benchmarks.architectures import Example
from tests.planner.steps import bytes_sent, collectives_of, halves_of, planned_collectives, planner_of, program_of

GIB = 2**30
DEVICES = 8


@dataclass(frozen=True)
class Planned:
    """A plan, forward and backward as one rank runs them, and the bytes of an element of its parameters."""

    plan: ShardingPlan
    halves: tuple[fx.GraphModule, ...]
    itemsize: int

    def records(self, module: str = "", phase: str | None = None) -> list[Collective]:
        """Collectives of the modules whose path begins so."""
        chosen = (record for record in self.plan.collectives if record.module.startswith(module))
        return [record for record in chosen if phase in (None, record.phase)]

    def sent(self, module: str = "", phase: str | None = None) -> float:
        """Bytes that one device sends for the sake of a module."""
        counts: Counter[tuple[str, str, int]] = Counter()
        for record in self.records(module, phase):
            counts[record.kind, record.axis, record.bytes] += record.count
        return bytes_sent(counts, self.plan.mesh)

    def operands(self, operator: str) -> Iterator[list[tuple[int, ...]]]:
        """Local shapes of the operands of every operator whose name contains a text."""
        for half in self.halves:
            for node in half.graph.nodes:
                if node.op == "call_function" and operator in str(node.target):
                    metas = (source.meta["val"] for source in node.all_input_nodes)
                    yield [tuple(meta.shape) for meta in metas if isinstance(meta, torch.Tensor)]

    def largest(self, length: int = 1) -> int:
        """Elements of the largest tensor made by one rank that has a dim of at least `length`; 0 without one."""
        nodes = (node for half in self.halves for node in half.graph.nodes if node.op == "call_function")
        metas = (node.meta.get("val") for node in nodes)
        tensors = (meta for meta in metas if isinstance(meta, torch.Tensor))
        return max((tensor.numel() for tensor in tensors if any(size >= length for size in tensor.shape)), default=0)

    def convolved(self) -> int:
        """Products of numbers in all convolutions of the forward half."""
        total = 0
        for node in self.halves[0].graph.nodes:
            if "convolution.default" in str(node.target):
                weight = node.args[1].meta["val"]
                total += node.meta["val"].numel() * math.prod(weight.shape[1:])
        return total

    def bytes_of(self, name: str) -> int:
        return math.prod(self.plan.shapes[name]) * self.itemsize

    def reduced(self, module: str = "") -> Counter[int]:
        """Bytes of the tensors that are reduced in the backward half of a module."""
        counts: Counter[int] = Counter()
        for record in self.records(module, "backward"):
            if record.kind in ("all_reduce", "reduce_scatter"):
                counts[record.bytes] += record.count
        return counts

    def whole(self, beginning: str = "") -> Counter[int]:
        """Bytes of the parameters that lie whole on every device, tied ones once; of those whose names begin so."""
        tied = {"lm_head.weight"} if "transformer.wte.weight" in self.plan.placements else set()
        names = set(self.plan.placements) - self.sharded() - tied
        kept = (name for name in names if name.startswith(beginning) and name.endswith(("weight", "bias")))
        return Counter(map(self.bytes_of, kept))

    def sharded(self) -> set[str]:
        """Names of the parameters that do not lie whole on every device."""
        return {name for name, specs in self.plan.placements.items() if any(map(is_shard, specs))}


@functools.cache
def planned(
    build: Callable[..., Example],
    *,
    devices: int = DEVICES,
    cluster: str = "h100",
    memory_limit: float | None = None,
    **options: Any,
) -> Planned:
    """Return the plan of an architecture on one axis; outputs may stay sharded, `memory_limit` is in GiB."""
    module, inputs = build(**options)
    limit = None if memory_limit is None else int(memory_limit * GIB)
    constraints = Constraints(planned_outputs=True)
    graph = capture(module, (), inputs)
    planner = planner_of(graph, {"x": devices}, constraints, Cluster.preset(cluster), memory_limit=limit)
    plan = planner.plan()
    itemsize = next(module.parameters()).element_size()
    return Planned(plan, halves_of(program_of(planner, plan)), itemsize)


def reduced_by_data_parallelism(plan: Planned) -> float:
    """Bytes that one device sends when every gradient is all-reduced once; tied parameters count under every name."""
    names = {name for name in plan.plan.placements if name.endswith(("weight", "bias", "up", "down"))}
    return sum(2 * (DEVICES - 1) / DEVICES * plan.bytes_of(name) for name in names)


llama_alone = functools.partial(planned, architectures.llama3_8b, batch=1)
gpt_alone = functools.partial(planned, architectures.gpt2_medium, batch=1, dtype=torch.float32)
gpt_uneven = functools.partial(gpt_alone, vocabulary=50257)
llama_many = functools.partial(planned, architectures.llama3_8b, batch=32)
gpt_many = functools.partial(planned, architectures.gpt2_medium, batch=64)
llama_short = functools.partial(planned, architectures.llama3_8b, batch=8, memory_limit=11)
experts = functools.partial(planned, architectures.gshard)
dna = functools.partial(planned, architectures.dna_bert, sequence=32768)
vgg = functools.partial(planned, architectures.vgg19, cluster="v100")
unet_many = functools.partial(planned, architectures.unet, batch=1024)
unet_few = functools.partial(planned, architectures.unet, batch=4, size=128)
resnet_few = functools.partial(planned, architectures.wide_resnet, widen=4, batch=4)


@functools.cache
def classifier(devices: int) -> Planned:
    """ResNet-50 with 100,000 classes, 32 images on every V100; one block to a stage, as the classifier is the point."""
    build = architectures.resnet50
    return planned(build, devices=devices, cluster="v100", batch=32 * devices, depths=(1, 1, 1, 1))


CASES: dict[str, Callable[[], Planned]] = {
    "llama_alone": llama_alone,
    "gpt_alone": gpt_alone,
    "gpt_uneven": gpt_uneven,
    "llama_many": llama_many,
    "gpt_many": gpt_many,
    "llama_short": llama_short,
    "experts": experts,
    "dna": dna,
    "vgg": vgg,
    "unet_many": unet_many,
    "unet_few": unet_few,
    "resnet_few": resnet_few,
    "classifier": functools.partial(classifier, 8),
}


@pytest.mark.parametrize("case", CASES)
def test_the_programs_send_what_the_plans_say(case: str) -> None:
    """An exchange inside a local program may be several collectives: kinds, axes and bytes are those of the plan."""
    made = CASES[case]()
    totals = []
    for counts in (collectives_of(*made.halves), planned_collectives(made.plan)):
        total: Counter[tuple[str, str]] = Counter()
        for (kind, axis, held), count in counts.items():
            total[kind, axis] += held * count
        totals.append(total)
    assert totals[0] == totals[1]


# One sequence: Megatron


def test_llama_of_one_sequence_has_column_then_row_parallel_weights() -> None:
    made = llama_alone()
    for layer in ("model.layers.0", "model.layers.1"):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            assert made.plan.placements[f"{layer}.{name}.weight"] == (Shard(0),), name
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            assert made.plan.placements[f"{layer}.{name}.weight"] == (Shard(1),), name
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= made.sharded()


@pytest.mark.parametrize("case", ["gpt_alone", "gpt_uneven"])
def test_gpt_of_one_sequence_has_column_then_row_parallel_weights(case: str) -> None:
    """Its linear layers hold `[inputs, outputs]`; queries, keys and values are fused: every third is cut.

    Biases lie with what they are added to: cut along the columns, whole behind the rows, where a sum is complete.
    """
    made = CASES[case]()
    for layer in ("transformer.h.0", "transformer.h.1"):
        for name, placement in {
            "attn.c_attn.weight": shard_placement(1, 3),
            "attn.c_attn.bias": shard_placement(0, 3),
            "attn.c_proj.weight": Shard(0),
            "attn.c_proj.bias": Replicate(),
            "mlp.c_fc.weight": Shard(1),
            "mlp.c_fc.bias": Shard(0),
            "mlp.c_proj.weight": Shard(0),
            "mlp.c_proj.bias": Replicate(),
        }.items():
            assert made.plan.placements[f"{layer}.{name}"] == (placement,), name
    assert made.plan.placements["transformer.wte.weight"] == (Shard(0),)


@pytest.mark.parametrize(
    ("case", "layer", "activation"),
    [
        ("llama_alone", "model.layers.1", 4096 * 4096 * 2),
        ("gpt_alone", "transformer.h.1", 1024 * 1024 * 4),
        ("gpt_uneven", "transformer.h.1", 1024 * 1024 * 4),
    ],
)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_layer_of_one_sequence_sends_no_more_than_megatron(
    case: str, layer: str, activation: int, phase: str
) -> None:
    """Two all-gathers and two reduce-scatters of the residual stream, or two all-reduces.

    Besides, tokens being split, the gradients of norms and of biases that lie whole are reduced, each once at most.
    """
    made = CASES[case]()
    stream: Counter[str] = Counter()
    rest: Counter[int] = Counter()
    for record in made.records(layer, phase):
        if record.bytes in (activation, activation // DEVICES):
            stream[record.kind] += record.count
        else:
            assert record.kind == "all_reduce"
            rest[record.bytes] += record.count
    assert stream in (Counter(all_gather=2, reduce_scatter=2), Counter(all_reduce=2))
    assert rest <= (made.whole(layer) if phase == "backward" else Counter())


@pytest.mark.parametrize(("case", "heads"), [("llama_alone", 32), ("gpt_alone", 16), ("gpt_uneven", 16)])
def test_every_device_attends_with_its_own_heads(case: str, heads: int) -> None:
    """Llama's eight heads of keys and values are repeated before."""
    shapes = list(CASES[case]().operands("autoshard.attention.default"))
    assert len(shapes) == 2
    for query, key, value, *_ in shapes:
        assert query[1] == key[1] == value[1] == heads // DEVICES


def test_norms_of_a_long_sequence_are_computed_on_shards_of_it() -> None:
    shapes = [operands[0] for operands in llama_alone().operands("rsqrt")]
    assert shapes
    assert set(shapes) == {(1, 4096 // DEVICES, 1)}


@pytest.mark.parametrize(
    ("case", "logits"),
    [("llama_alone", 4096 * 128256 // 8), ("gpt_alone", 1024 * 50304 // 8), ("gpt_uneven", 1024 * -(-50257 // 8))],
)
def test_logits_and_the_table_of_words_are_never_whole(case: str, logits: int) -> None:
    """Not when the vocabulary is uneven either: the last device holds padding besides its words."""
    assert CASES[case]().largest() <= logits


@pytest.mark.parametrize("case", ["gpt_alone", "gpt_uneven"])
def test_the_loss_of_a_sharded_vocabulary_sends_a_few_numbers_for_every_token(case: str) -> None:
    """A maximum and a sum, then the loss of every token's word; the head's input has its gradient reduced."""
    made = CASES[case]()
    loss = [record for record in made.records() if record.module == ""]
    assert {record.kind for record in loss} == {"all_reduce"}
    assert sum(record.bytes * record.count for record in loss) <= 4 * 4 * 1024
    (head,) = made.records("lm_head")
    assert (head.kind, head.phase, head.bytes) == ("all_reduce", "backward", 1024 * 1024 * 4)
    assert made.plan.output_placements["logits"] == (Shard(2),)


# Many sequences: data parallel


@pytest.mark.parametrize("case", ["llama_many", "gpt_many"])
def test_with_many_sequences_the_gradient_of_every_whole_parameter_is_reduced_once(case: str) -> None:
    made = CASES[case]()
    assert made.sharded() <= {"model.embed_tokens.weight"}
    assert made.reduced() == made.whole()


@pytest.mark.parametrize(("case", "batch", "heads"), [("llama_many", 32, 32), ("gpt_many", 64, 16)])
def test_with_many_sequences_every_device_has_its_own(case: str, batch: int, heads: int) -> None:
    for query, *_ in CASES[case]().operands("autoshard.attention.default"):
        assert query[:2] == (batch // DEVICES, heads)


def test_with_many_sequences_nothing_else_is_sent_than_a_few_numbers() -> None:
    """The table of Llama's words is the exception: tokens, and their gradients, are fewer than words."""
    rest = [record for record in gpt_many().records() if record.phase == "forward"]
    assert sum(record.bytes * record.count for record in rest) <= 16
    rest = [record for record in llama_many().records() if record.kind != "all_reduce" or record.phase == "forward"]
    exchanged = 32 * 4096 * 4096 * 2 // DEVICES
    assert {(record.kind, record.bytes, record.count) for record in rest if record.bytes > 4} == {
        ("all_to_all", exchanged, 1)
    }
    assert sum(record.bytes * record.count for record in rest) <= 2 * exchanged + 16
    assert llama_many().sent() <= reduced_by_data_parallelism(llama_many())


# Memory is short: parameters sharded, as few as must be


def test_with_little_memory_large_parameters_are_sharded_and_gathered_once_for_each_half() -> None:
    made, ample = llama_short(), planned(architectures.llama3_8b, batch=8)
    assert ample.plan.memory.peak > 11 * GIB >= made.plan.memory.peak
    assert made.sharded() > ample.sharded()
    matrices = [name for name in made.sharded() - ample.sharded() if name != "lm_head.weight"]
    assert matrices
    for name in matrices:
        module = name.removesuffix(".weight")
        kinds = {phase: Counter(r.kind for r in made.records(module, phase)) for phase in ("forward", "backward")}
        assert kinds["forward"] <= Counter(all_gather=1), name
        assert kinds["backward"] <= Counter(all_gather=1, reduce_scatter=1), name


def test_with_little_memory_parameters_that_need_not_are_not_sharded() -> None:
    made = llama_short()
    assert min(made.bytes_of(name) for name in made.sharded()) >= 2**20
    assert set(made.plan.placements) - made.sharded() > {"model.norm.weight", "model.layers.0.input_layernorm.weight"}


def test_with_little_memory_no_norm_of_gpt_is_sharded() -> None:
    made = planned(architectures.gpt2_medium, layers=4, batch=16, memory_limit=2.2)
    assert min(made.bytes_of(name) for name in made.sharded()) >= 2**20


# Large classifiers: features data parallel, classes split (Whale, Figure 3; Rhino, Table 3)


@pytest.mark.parametrize("devices", [8, 32])
def test_a_resnet_with_many_classes_is_data_parallel_and_its_classifier_split(devices: int) -> None:
    made = classifier(devices)
    assert made.sharded() == {"classifier.weight", "classifier.bias"}
    assert made.plan.placements["classifier.weight"] == made.plan.placements["classifier.bias"] == (Shard(0),)
    images = {operands[0][0] for operands in made.operands("convolution.default")}
    assert images == {32}


@pytest.mark.parametrize("devices", [8, 32])
def test_logits_of_many_classes_are_never_gathered(devices: int) -> None:
    made = classifier(devices)
    assert made.largest(100_000) <= 32 * 100_000  # at most those of its own images
    features = 32 * devices * 2048 * 2
    heads = [record for record in made.records() if record.module in ("", "classifier")]
    large = {(record.kind, record.phase): record.bytes for record in heads if record.bytes > 8 * 32 * devices}
    assert large == {("all_gather", "forward"): features // devices, ("reduce_scatter", "backward"): features}


def test_a_vgg_of_a_million_classes_reduces_the_gradients_of_its_convolutions_alone() -> None:
    made = vgg()
    assert made.sharded() == {"classifier.weight", "classifier.bias", "hidden.0.weight", "hidden.2.weight"}
    assert made.plan.placements["classifier.weight"] == (Shard(0),)
    assert {operands[0][0] for operands in made.operands("convolution.default")} == {1024 // DEVICES}
    assert made.largest(1_000_000) <= 1024 * 1_000_000 // DEVICES
    assert made.sent() <= 0.01 * reduced_by_data_parallelism(made)


# Experts


def test_experts_are_parallel_and_tokens_travel_to_them_and_back() -> None:
    made = experts()
    capacity = 2 * 1024 // 8
    dispatched = 8 * 8 * capacity * 2048 * 2 // DEVICES
    for layer in ("layers.0.moe", "layers.1.moe"):
        for name in ("up", "down"):
            assert made.plan.placements[f"{layer}.{name}"] == (Shard(0),)
        for phase in ("forward", "backward"):
            sent = [record for record in made.records(layer, phase) if record.module == layer]
            assert Counter({record.kind: record.count for record in sent}) == Counter(all_to_all=2)
            assert {record.bytes for record in sent} == {dispatched}


def test_experts_send_a_fraction_of_what_data_parallelism_would() -> None:
    made = experts()
    assert made.sent() <= 0.2 * reduced_by_data_parallelism(made)


# Long sequences with heads that the devices do not divide


def test_tokens_of_a_long_sequence_are_sharded_when_heads_can_not_be() -> None:
    made = dna()
    shapes = list(made.operands("autoshard.attention.default"))
    assert len(shapes) == 2
    for query, key, value, *_ in shapes:
        assert query[1:3] == (12, 32768 // DEVICES)
        assert key[1:3] == value[1:3] == (12, 32768)
    assert not any(".layer." in name for name in made.sharded())


def test_a_long_sequence_is_gathered_at_most_for_keys_and_values() -> None:
    made = dna()
    activation = 32768 * 768 * 2
    for phase in ("forward", "backward"):
        large = [r for r in made.records("bert.encoder.layer.1", phase) if r.bytes >= activation // DEVICES]
        assert sum(record.count for record in large) <= 2
        assert {record.kind for record in large} <= {"all_gather", "reduce_scatter"}


# Images: the batch, then channels


def test_a_unet_with_many_images_is_data_parallel() -> None:
    made = unet_many()
    images = {operands[0][0] for operands in made.operands("convolution.default")}
    assert images == {1024 // DEVICES}
    assert not made.sharded()
    assert made.reduced() == made.whole()
    assert sum(record.bytes * record.count for record in made.records(phase="forward")) <= 16


def test_a_unet_with_fewer_images_than_devices_has_its_channels_or_rows_split() -> None:
    """A batch of four leaves half of eight devices idle, or worse: whole weights on whole images, on all of them."""
    shares = [planned(architectures.unet, batch=4, size=128, devices=devices).convolved() for devices in (1, DEVICES)]
    assert shares[1] < shares[0] / 4


def test_a_wide_resnet_with_fewer_images_than_devices_has_its_channels_split() -> None:
    """Behind the first stage, whose images are large enough to be split in rows."""
    made, alone = resnet_few(), resnet_few(devices=1)
    assert made.convolved() < 1.05 * alone.convolved() / DEVICES
    large = [name for name in made.plan.placements if name.endswith("conv2.weight")]
    assert len(large) == 16
    assert all(name in made.sharded() for name in large[3:])
    # No gradient of a convolution is reduced: every device has all images of its channels.
    reduced = [record for record in made.records(phase="backward") if record.kind == "all_reduce"]
    assert sum(record.bytes * record.count for record in reduced) <= 0.05 * reduced_by_data_parallelism(made)


def test_replicated_is_what_is_not_sharded() -> None:
    """The helper above reads placements right."""
    made = classifier(8)
    whole = set(made.plan.placements) - made.sharded()
    assert whole
    assert all(made.plan.placements[name] == (Replicate(),) for name in whole)
