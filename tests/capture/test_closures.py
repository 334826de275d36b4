from __future__ import annotations

import torch

from autoshard.capture.closures import FreeTensors, Substitution


def test_what_code_reads_and_was_neither_given_nor_made_is_found() -> None:
    given, free, other = torch.ones(2), torch.ones(2), torch.ones(2)
    scope = FreeTensors([given])
    with scope:
        made = given * free
        torch.cat([made, given[:1], other])
    assert [id(tensor) for tensor in scope.tensors] == [id(free), id(other)]
    assert not scope.has_mutated_tensor()


def test_changes_of_found_tensors_are_known() -> None:
    free = torch.ones(2)
    scope = FreeTensors([])
    with scope:
        free.add_(1)
    assert scope.has_mutated_tensor()


def test_tensors_are_replaced_wherever_they_are_passed() -> None:
    known, stranger = torch.ones(2), torch.full((2,), 3.0)
    with Substitution({id(known): torch.full((2,), 5.0)}):
        total = torch.stack([known, stranger]).sum() + torch.add(stranger, other=known).sum()
    assert total == 16 + 16


def test_losses_are_computed_as_in_all_that_is_exported() -> None:
    """Torch's own looks at the numbers of the variance, and refuses these."""
    with Substitution({}):
        loss = torch.nn.functional.gaussian_nll_loss(torch.ones(2), torch.ones(2), torch.tensor([-1.0, 1.0]))
    assert loss.isfinite()
