"""Rows sorted into blocks of one group each, and sums of rows."""

import pytest
import torch

from kernels import group_rows, sum_rows

CASES = {  # the groups of rows, and how many groups there may be
    "even": (torch.arange(4096) % 16, 16),
    "random": (torch.randint(16, (4096,), generator=torch.Generator().manual_seed(0)), 16),
    "all in the last": (torch.full((1000,), 15), 16),
    "all in the first": (torch.zeros(1000, dtype=torch.long), 16),
    "whole blocks": (torch.arange(8).repeat_interleave(64), 8),
    "fewer rows than groups": (torch.tensor([6, 2, 2]), 7),
    "one row": (torch.tensor([1]), 2),
    "one group": (torch.zeros(77, dtype=torch.long), 1),
    "as many as a byte tells apart": (torch.arange(3000) * 7 % 256, 256),
}


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in CASES), ("random", True), ("one row", True)]
)
def test_each_row_has_a_place_of_its_own_in_a_block_of_its_group(name, compiled, device):
    group, groups = CASES[name]
    function = torch.compile(group_rows, fullgraph=True, dynamic=False, backend="aot_eager") if compiled else group_rows
    place, row_at, owner, rows = (t.cpu() for t in function(group.to(device), groups))
    n, size = len(group), len(row_at) // len(owner)
    assert rows.tolist() == [(group == g).sum().item() for g in range(groups)]
    assert torch.equal(row_at[place], torch.arange(n)), "each row where it went"
    assert (row_at == n).sum() == len(row_at) - n, "padding elsewhere"
    in_order = place[group.sort(stable=True).indices]
    assert torch.equal(in_order.sort().values, in_order)
    assert owner.dtype == torch.bool and (owner.sum(1) <= 1).all()
    assert owner[place // size, group].all(), "in a block of its group"


def test_shapes_do_not_depend_on_the_groups_and_the_padding_is_an_eighth():
    shapes = {tuple(t.shape for t in group_rows(torch.randint(k, (4096,)), 16)) for k in (1, 2, 5, 16)}
    assert shapes == {((4096,), (4096 * 9 // 8,), (144, 16), (16,))}


def test_more_groups_than_a_byte_tells_apart_are_refused():
    with pytest.raises(ValueError, match="groups must be at most 256, not 257"):
        group_rows(torch.arange(257), 257)


@pytest.mark.parametrize("compiled", [False, True])
def test_sums_of_rows_and_their_gradient(compiled, device):
    """Row 1 is in two sums, row 3 in none; index 5 is no row."""
    x = torch.randn(5, 4, dtype=torch.float64, device=device, requires_grad=True)
    at = torch.tensor([[0, 1, 5], [2, 1, 4], [5, 5, 5]], device=device)
    back = torch.tensor([[0, 3], [0, 1], [1, 3], [3, 3], [3, 1]], device=device)
    function = torch.compile(sum_rows, fullgraph=True, dynamic=False, backend="aot_eager") if compiled else sum_rows
    y, expected = function(x, at, back), torch.cat([x, x.new_zeros(1, 4)])[at].sum(1)
    torch.testing.assert_close(y, expected)
    weight = torch.randn_like(y)
    torch.testing.assert_close(*(torch.autograd.grad((z * weight).sum(), x)[0] for z in (y, expected)))
