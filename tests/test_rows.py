"""Adam on rows, as a Triton kernel and in plain PyTorch, against its reference in float64; and sums of rows."""

import math

import pytest
import torch
from reference_optimizer import SparseAdam

import kernels

STEPS = [kernels._row_adam_torch, kernels._row_adam_triton]


def example(n: int, columns: int, dtype: torch.dtype, device, rows: int = 9):
    """A table, its state (a third of the rows still without an update), ids of rows 0 to 4, and gradients."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(rows, columns, generator=generator)
    state = torch.rand(rows, 2, generator=generator) * torch.tensor([1, 9]) + torch.tensor([0, 1])
    state = (state * (torch.arange(rows) % 3 > 0)[:, None]).contiguous()
    state[:, 1].floor_()  # second moment, updates
    ids, grads = torch.randint(5, (n,), generator=generator), torch.randn(n, columns, generator=generator)
    return table.to(device, dtype), state.to(device), ids.to(device), grads.to(device, dtype)


def scalars(device, loss_scale=8.0, found_inf=0.0):
    return 0.1, 0.9, 4.0, *(torch.tensor(x, device=device) for x in (loss_scale, found_inf))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n, columns", [(1, 1), (3, 8), (4, 48), (5, 64), (40, 40), (513, 384)])
def test_rows_that_are_touched_follow_the_reference_and_others_stay(step, dtype, n, columns, device):
    table, state, ids, grads = example(n, columns, dtype, device)
    reference = SparseAdam(table.double().cpu())
    for row, (v, updates) in enumerate(state.double().tolist()):
        if updates:
            reference.v[row], reference.updates[row] = v, updates
    reference.step(list(zip(ids.tolist(), grads.double().cpu() / 8, strict=True)), 0.1, 0.9, 4.0)
    before, old_state = table.clone(), state.clone()
    step(table, state, ids, grads, *scalars(device))
    eps = torch.finfo(dtype).eps  # the interpreter rounds bf16 down
    torch.testing.assert_close(table.double().cpu(), reference.p, rtol=eps, atol=1e-6)
    touched = ids.unique().tolist()
    expected = torch.tensor([(reference.v[row], reference.updates[row]) for row in touched], dtype=torch.float64)
    torch.testing.assert_close(state.double().cpu()[touched], expected, rtol=1e-5, atol=0)
    rest = [row for row in range(len(table)) if row not in touched]
    assert torch.equal(table[rest], before[rest]) and torch.equal(state[rest], old_state[rest])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("bad, found_inf", [(math.inf, 0.0), (-math.inf, 0.0), (math.nan, 0.0), (math.nan, 1.0)])
def test_a_row_whose_gradient_is_not_finite_stays_and_in_a_skipped_step_all_do(step, bad, found_inf, device):
    table, state, ids, grads = example(40, 48, torch.float32, device)
    before, old_state = table.clone(), state.clone()
    grads[(ids == 2).nonzero()[-1], 7] = bad
    step(table, state, ids, grads, *scalars(device, found_inf=found_inf))
    moved = [not found_inf and row in (0, 1, 3, 4) for row in range(9)]
    assert (table != before).any(1).tolist() == (state != old_state).all(1).tolist() == moved
    assert (state != old_state).any(1).tolist() == moved


@pytest.mark.parametrize("step", STEPS)
def test_a_thousand_gradients_of_one_row_that_overflow_together_in_fp16_are_summed_in_fp32(step, device):
    table, state = torch.zeros(3, 8, device=device, dtype=torch.float16), torch.zeros(3, 2, device=device)
    grads = torch.full((1024, 8), 1024.0, device=device, dtype=torch.float16)
    step(table, state, torch.ones(1024, dtype=torch.long, device=device), grads, *scalars(device, loss_scale=1.0))
    assert state.tolist() == [[0, 0], [2.0**40, 1], [0, 0]]
    torch.testing.assert_close(table[1].float(), torch.full((8,), -0.1, device=device), rtol=1e-3, atol=0)


def test_tensors_that_do_not_match_are_refused(device):
    table, state, ids, grads = tensors = example(3, 8, torch.float32, device)
    parts = (table[:, :4], state, ids, grads[:, :4]), (table, state.repeat(1, 2)[:, :2], ids, grads)
    for wrong in (*parts, (table, state[:, 0], ids, grads), (table, state, ids[:2], grads)):
        with pytest.raises(ValueError, match="contiguous"):
            kernels.row_adam_(*wrong, *scalars(device))
    for moved in range(4):
        with pytest.raises(ValueError, match="must be on"):
            kernels.row_adam_(*(t.to("meta") if i == moved else t for i, t in enumerate(tensors)), *scalars(device))
        with pytest.raises(ValueError, match="must be on"):
            kernels.sum_rows(*(t.to("meta") if i == moved % 3 else t for i, t in enumerate((table, ids, ids))))


@pytest.mark.gpu
def test_the_same_gradients_give_the_same_bits(device):
    """No atomic additions: a run can be repeated."""
    results = []
    for _ in range(3):
        table, state, ids, grads = example(20_000, 384, torch.float16, device)
        kernels.row_adam_(table, state, ids, grads, *scalars(device))
        results.append((table, state))
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_sums_of_rows_and_their_gradient(compiled, device):
    """Each of 5 rows is in two of 10 sums of one row; and the other way round."""
    at = torch.tensor([[3], [0], [1], [4], [2], [0], [3], [4], [1], [2]], device=device)
    back = torch.stack([(at[:, 0] == row).nonzero()[:, 0] for row in range(5)])
    function = torch.compile(kernels.sum_rows, fullgraph=True, backend="aot_eager") if compiled else kernels.sum_rows
    for rows, there, back_again in ((5, at, back), (10, back, at)):
        x = torch.randn(rows, 4, dtype=torch.float64, device=device, requires_grad=True)
        y, expected = function(x, there, back_again), x[there].sum(1)
        assert torch.equal(y, expected)
        weight = torch.randn_like(y)
        torch.testing.assert_close(*(torch.autograd.grad((z * weight).sum(), x)[0] for z in (y, expected)))
