import numpy as np
import pytest
import torch

from budgetdb.errors import UsageError
from budgetdb.sampling import TokenBudgetBatchSampler

LENGTHS = [3, 9, 1, 4, 1, 5, 9, 2, 6]
SAMPLER = TokenBudgetBatchSampler(LENGTHS, 12)
ORDER = SAMPLER.order.tolist()
BATCHES = list(SAMPLER)
ROWS = len(LENGTHS)


def test_a_list_of_rows():
    assert SAMPLER.restore_order(ORDER) == list(range(ROWS))
    assert SAMPLER.restore_order(tuple(ORDER)) == list(range(ROWS))
    assert SAMPLER.restore_order(iter(ORDER)) == list(range(ROWS))
    assert SAMPLER.restore_order([f"text {index}" for index in ORDER]) == [f"text {index}" for index in range(ROWS)]


def test_an_array_of_rows():
    rows = np.array(ORDER)[:, None] * np.array([1, 10])
    restored = SAMPLER.restore_order(rows)
    assert isinstance(restored, np.ndarray)
    np.testing.assert_array_equal(restored, np.arange(ROWS)[:, None] * np.array([1, 10]))


def test_a_tensor_of_rows_keeps_its_dtype_and_gradient():
    rows = torch.tensor(ORDER, dtype=torch.bfloat16, requires_grad=True)
    restored = SAMPLER.restore_order(rows)
    assert restored.dtype == torch.bfloat16
    assert restored.requires_grad
    assert restored.tolist() == list(range(ROWS))


def test_batches_of_tensors_become_one_tensor():
    restored = SAMPLER.restore_order([torch.tensor(batch)[:, None].expand(-1, 4) for batch in BATCHES])
    assert torch.equal(restored, torch.arange(ROWS)[:, None].expand(-1, 4))


def test_batches_of_arrays_become_one_array():
    restored = SAMPLER.restore_order(np.array(batch) for batch in BATCHES)
    np.testing.assert_array_equal(restored, np.arange(ROWS))


def test_batches_of_lists_become_one_list():
    assert SAMPLER.restore_order(BATCHES) == list(range(ROWS))
    texts = [[f"text {index}" for index in batch] for batch in BATCHES]
    assert SAMPLER.restore_order(texts) == [f"text {index}" for index in range(ROWS)]


@pytest.mark.parametrize("make", [torch.full, np.full])
def test_batches_padded_to_different_lengths_become_a_list_of_rows(make):
    outputs = [
        np.stack([make((length, 2), index) for index in batch])
        if make is np.full
        else torch.stack([make((length, 2), index) for index in batch])
        for batch, length in zip(BATCHES, SAMPLER.batch_lengths.tolist(), strict=True)
    ]
    restored = SAMPLER.restore_order(outputs)
    assert isinstance(restored, list)
    assert [int(row[0, 0]) for row in restored] == list(range(ROWS))
    assert [len(row) for row in restored] != [len(restored[0])] * ROWS


def test_ragged_rows_stay_a_list():
    rows = [torch.full((LENGTHS[index],), index) for index in ORDER]
    restored = SAMPLER.restore_order(rows)
    assert [row.tolist() for row in restored] == [[index] * LENGTHS[index] for index in range(ROWS)]


def test_batches_of_one_row_each_read_as_rows_or_as_batches():
    sampler = TokenBudgetBatchSampler([4, 6, 5], 6)
    assert sampler.batch_sizes.tolist() == [1, 1, 1]
    assert sampler.restore_order([0.6, 0.5, 0.4]) == [0.4, 0.6, 0.5]
    assert sampler.restore_order([torch.tensor(6), torch.tensor(5), torch.tensor(4)]) == [4, 6, 5]
    assert sampler.restore_order(["six", "five", "four"]) == ["four", "six", "five"]
    assert sampler.restore_order([torch.zeros(6), torch.zeros(5), torch.zeros(4)])[1].shape == (6,)
    assert sampler.restore_order([torch.tensor([6]), torch.tensor([5]), torch.tensor([4])]).tolist() == [4, 6, 5]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (list(range(8)), "8 outputs for 9 rows in 5 batches"),
        (np.zeros((10, 3)), "10 outputs for 9 rows in 5 batches"),
        (torch.zeros(3), "3 outputs for 9 rows in 5 batches"),
        ([], "0 outputs for 9 rows in 5 batches"),
        ([np.zeros(1)] * 5, "output 2 has 1 rows, but batch 2 has 2"),
        ([torch.tensor(0.5)] * 5, "output 0 has no rows, but batch 0 has 1"),
        ([{"loss": 0.5, "logits": [1]}] * 5, r"output 0 has the fields loss, logits \(collect one of them\), but"),
        (torch.tensor(0.5), "a single number"),
    ],
)
def test_wrong_counts_are_refused_with_both_numbers(outputs, message):
    assert SAMPLER.batch_sizes.tolist() == [1, 1, 2, 3, 2]
    with pytest.raises(UsageError, match=message):
        SAMPLER.restore_order(outputs)


@pytest.mark.parametrize("outputs", [[], np.zeros((0, 3)), torch.zeros(0, 3)])
def test_no_outputs_of_no_samples(outputs):
    restored = TokenBudgetBatchSampler([], 8).restore_order(outputs)
    assert type(restored) is type(outputs)
    assert len(restored) == 0
