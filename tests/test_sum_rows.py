"""Sums of rows, as experts take them, and their gradient."""

import pytest
import torch

from kernels import sum_rows


@pytest.mark.parametrize("compiled", [False, True])
def test_sums_of_rows_and_their_gradient(compiled, device):
    """Each of 5 rows is in two of 10 sums of one row; and the other way round."""
    at = torch.tensor([[3], [0], [1], [4], [2], [0], [3], [4], [1], [2]], device=device)
    back = torch.stack([(at[:, 0] == row).nonzero()[:, 0] for row in range(5)])
    function = torch.compile(sum_rows, fullgraph=True, dynamic=False, backend="aot_eager") if compiled else sum_rows
    for rows, there, back_again in ((5, at, back), (10, back, at)):
        x = torch.randn(rows, 4, dtype=torch.float64, device=device, requires_grad=True)
        y, expected = function(x, there, back_again), x[there].sum(1)
        assert torch.equal(y, expected)
        weight = torch.randn_like(y)
        torch.testing.assert_close(*(torch.autograd.grad((z * weight).sum(), x)[0] for z in (y, expected)))


@pytest.mark.parametrize("moved", range(3))
def test_tensors_of_another_device_are_refused(moved, device):
    tensors = torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="must be on"):
        sum_rows(*(t.to("meta" if i == moved else device) for i, t in enumerate(tensors)))
