from __future__ import annotations

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

import autoshard
from autoshard.errors import HintError
from autoshard.planner.hints import describe, hint_text, parse_hint, recorded_hints, resolve
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import shard_placement

R = Replicate()
MESH = MeshShape.of({"dp": 2, "tp": 4})
PARAMETERS = {
    "embed.weight": (64, 16),
    "layers.0.mlp.up.weight": (48, 16),
    "layers.0.mlp.up.bias": (48,),
    "layers.1.mlp.up.weight": (48, 16),
    "layers.1.mlp.up.bias": (48,),
    "small.weight": (3, 10),
}
ALIASES = {"embed.weight": ("embed.weight", "lm_head.weight")}
MODULES = ("", "embed", "lm_head", "layers", "layers.0", "layers.0.mlp", "layers.0.mlp.up", "layers.0.act", "layers.1",
           "layers.1.mlp", "layers.1.mlp.up", "small")  # fmt: skip


def pins(hints: object, mesh: MeshShape = MESH) -> dict:
    return resolve(hints, PARAMETERS, ALIASES, MODULES, mesh)


def test_no_hints_pin_nothing() -> None:
    assert pins(None) == {}
    assert pins({}) == {}


def test_a_mapping_leaves_other_axes_to_the_planner() -> None:
    assert pins({"embed.weight": {"tp": Shard(0)}}) == {"embed.weight": (None, Shard(0))}


def test_a_sequence_gives_one_placement_per_axis() -> None:
    assert pins({"embed.weight": (R, Shard(1))}) == {"embed.weight": (R, Shard(1))}
    assert pins({"embed.weight": [None, Shard(1)]}) == {"embed.weight": (None, Shard(1))}


def test_one_placement_is_for_every_axis() -> None:
    assert pins({"embed.weight": Shard(0)}) == {"embed.weight": (Shard(0), Shard(0))}
    assert pins({"embed.weight": R}) == {"embed.weight": (R, R)}


def test_a_module_stands_for_the_parameters_below_it() -> None:
    reached = pins({"layers.*.mlp": {"tp": Shard(0)}})
    assert set(reached) == {name for name in PARAMETERS if ".mlp." in name}
    assert set(reached.values()) == {(None, Shard(0))}


def test_a_tied_parameter_may_go_by_any_of_its_names() -> None:
    assert pins({"lm_head.weight": {"tp": Shard(0)}}) == {"embed.weight": (None, Shard(0))}
    assert pins({"lm_head": {"tp": Shard(0)}}) == {"embed.weight": (None, Shard(0))}


def test_dims_are_counted_from_the_front() -> None:
    assert pins({"embed.weight": {"tp": Shard(-1)}}) == {"embed.weight": (None, Shard(1))}


def test_an_axis_of_size_one_replicates() -> None:
    mesh = MeshShape.of({"dp": 1, "tp": 4})
    assert pins({"embed.weight": Shard(0)}, mesh) == {"embed.weight": (R, Shard(0))}


def test_hints_of_different_axes_join() -> None:
    joined = pins({"embed.weight": {"tp": Shard(0)}, "embed": {"dp": Shard(1)}})
    assert joined == {"embed.weight": (Shard(1), Shard(0))}


def test_hints_that_agree_may_overlap() -> None:
    both = pins({"embed.weight": {"tp": Shard(1)}, "embed": {"tp": Shard(-1)}})
    assert both == {"embed.weight": (None, Shard(1))}


def test_strided_placements_are_kept() -> None:
    strided = shard_placement(0, 3)
    assert pins({"layers.0.mlp.up.weight": {"tp": strided}}) == {"layers.0.mlp.up.weight": (None, strided)}


def test_an_uneven_dim_may_be_sharded_over_one_axis() -> None:
    assert pins({"small.weight": {"tp": Shard(1)}}) == {"small.weight": (None, Shard(1))}


@pytest.mark.parametrize(
    ("hints", "said"),
    [
        (
            {"lm_haed.weight": R},
            r"'lm_haed\.weight' matches no parameter and no module\. Close ones are lm_head\.weight",
        ),
        ({"layers.0.act": R}, r"matches the module layers\.0\.act, which has no parameters"),
        ({"embed.weight": {"pp": Shard(0)}}, r"'embed\.weight'.* names the mesh axis 'pp'.*dp=2, tp=4"),
        ({"embed.weight": (R,)}, r"has 1 placements for the 2 axes of the mesh \(dp=2, tp=4\)"),
        ({"embed.weight": {"tp": Shard(2)}}, r"'embed\.weight' shards dim 2 of embed\.weight, which has 2 dims"),
        ({"layers.*.mlp": {"tp": Shard(1)}}, r"shards dim 1 of layers\.0\.mlp\.up\.bias, which has 1 dims"),
        ({"embed.weight": Partial()}, r"cannot be Partial"),
        ({"embed.weight": "S(0)"}, r"'S\(0\)' pins no placement"),
        ({"embed.weight": {"tp": 0}}, r"0 pins no placement"),
        ({3: R}, r"3 is not a text"),
        ({"small.weight": {"tp": Shard(0)}}, r"dim 0 of small\.weight, of size 3, over tp=4: .* 4 parts"),
        ({"small.weight": Shard(1)}, r"of size 10, over dp=2 and tp=4, as S\(1\), S\(1\): 10 does not divide evenly"),
        ({"small.weight": {"dp": shard_placement(1, 3)}}, r"over dp=2, as S\(1,f=3\): 10 does not divide evenly"),
        (
            {"layers.0.mlp.up.weight": (shard_placement(0, 3), Shard(0))},
            r"as S\(0,f=3\), S\(0\): torch gathers a dim wrongly that several axes split, one of them strided",
        ),
        (
            {"embed.weight": {"tp": Shard(0)}, "lm_head": {"tp": Shard(1)}},
            r"contradict.*embed\.weight, mesh axis 'tp': 'embed\.weight' asks for S\(0\), 'lm_head' for S\(1\)",
        ),
    ],
)
def test_a_wrong_hint_is_quoted(hints: object, said: str) -> None:
    with pytest.raises(HintError, match=said):
        pins(hints)


def test_hints_are_described_as_text() -> None:
    hints = {"a": Shard(0), "b": (None, Shard(1)), "c": {"tp": shard_placement(0, 3), "dp": R}}
    assert describe(hints) == {"a": "S(0)", "b": "- S(1)", "c": "tp: S(0,f=3), dp: R"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("R", R),
        (" S(1) ", Shard(1)),
        ("tp:S(0)", {"tp": Shard(0)}),
        ("dp: R, tp:S(0,f=3)", {"dp": R, "tp": shard_placement(0, 3)}),
        ("R S(0)", (R, Shard(0))),
        ("-,S(0,f=3)", (None, shard_placement(0, 3))),
        ("-", (None,)),
        ("replicate", autoshard.replicate()),
        ("split(4)", autoshard.split(4)),
        ("split(tp)", autoshard.split("tp")),
        ("replicate('dp', 'ep')", autoshard.replicate(("dp", "ep"))),
        ("split(tp, rest=whole)", autoshard.split("tp", rest="whole")),
        ("recompute()", autoshard.recompute()),
        (" keep ", autoshard.keep()),
        ("offload()", autoshard.offload()),
        ("replicate(dp), split(4)", (autoshard.replicate("dp"), autoshard.split(4))),
    ],
)
def test_values_are_read_from_text(text: str, value: object) -> None:
    assert parse_hint(text) == value
    assert parse_hint(hint_text(parse_hint(text))) == value


def test_the_record_of_a_plan_is_read_as_its_hints() -> None:
    hints = {
        "*.up": (None, Shard(1)),
        "small": R,
        "embed.weight": {"dp": Shard(0), "tp": shard_placement(1, 2)},
        "layers.*.mlp": autoshard.split(("dp", "tp")),
        "": autoshard.replicate(2),
        "embed": autoshard.recompute(),
        "layers": (autoshard.replicate("dp"), autoshard.split(("tp", "ep"), rest="sequence")),
    }
    # A plan also records the primitives of the model's code.
    assert recorded_hints({**describe(hints), "replicate(4)": "tp"}) == hints


@pytest.mark.parametrize(
    "text",
    [
        "",
        "S",
        "tp:",
        "tp:S",
        ":S(0)x",
        "split(",
        "S(0) tp:R",
        "tp:R:S(0)",
        "merge(4)",
        "keep(4)",
        "recompute(), keep()",
        "tp:R,tp:R",
        "split(4, rest=all)",
    ],
)
def test_texts_that_are_no_hints(text: str) -> None:
    with pytest.raises(HintError, match="is no placement: write"):
        parse_hint(text)
