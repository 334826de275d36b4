"""Relative differences."""

from __future__ import annotations

import math

import torch

from autoshard.tools.verify.differences import difference_scales, relative_difference


def test_a_scale_is_the_largest_number_of_a_tensor_but_not_far_below_the_others() -> None:
    references = {"large": torch.tensor([-2000.0, 1.0]), "tiny": torch.tensor([1e-12]), "empty": torch.zeros(0)}
    assert difference_scales(references) == {"large": 2000.0, "tiny": 2.0, "empty": 2.0}
    assert difference_scales({"mask": torch.tensor([-math.inf, 3.0])}) == {"mask": 3.0}
    assert difference_scales({"phase": torch.tensor([3 + 4j])}) == {"phase": 5.0}


def test_the_largest_difference_over_ranks_counts() -> None:
    whole = torch.tensor([1.0, 4.0])
    assert relative_difference([(whole, whole), (whole + 2, whole)], 4.0) == 0.5
    assert relative_difference([(whole + 2, whole)], 0.0) == 2.0
    assert relative_difference([(torch.zeros(0), torch.zeros(0))], 1.0) == 0.0
    assert relative_difference([(torch.tensor(True), torch.tensor(False))], 1.0) == 1.0


def test_numbers_that_are_not_finite() -> None:
    masked = torch.tensor([-math.inf, 1.0])
    assert relative_difference([(masked, masked.clone())], 1.0) == 0.0
    assert relative_difference([(torch.tensor([0.0, 1.0]), masked)], 1.0) == math.inf
    assert relative_difference([(torch.tensor([math.nan]), torch.tensor([math.nan]))], 1.0) == math.inf


def test_shapes_and_missing_tensors() -> None:
    assert relative_difference([(torch.zeros(2), torch.zeros(3))], 1.0) == math.inf
    assert relative_difference([], 1.0) == math.inf
