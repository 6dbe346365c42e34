import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset

from budgetdb.errors import LengthsError
from budgetdb.sampling.lengths import read_lengths

WANTED = [5, 0, 7, 130]


@pytest.mark.parametrize(
    "source",
    [
        WANTED,
        tuple(WANTED),
        [5.0, 0, np.float32(7), np.int16(130)],
        [np.uint8(5), np.int64(0), 7, 130],
        [torch.tensor(5), torch.tensor(0), 7, np.array(130)],
        iter(WANTED),
        (length for length in WANTED),
        dict(enumerate(WANTED)).values(),
        np.array(WANTED),
        np.array(WANTED, dtype=np.uint8),
        np.array(WANTED, dtype=np.uint64),
        np.array(WANTED, dtype=np.float16),
        np.array(WANTED, dtype=object),
        torch.tensor(WANTED),
        torch.tensor(WANTED, dtype=torch.int32),
        torch.tensor(WANTED, dtype=torch.bfloat16),
        torch.tensor(WANTED, dtype=torch.float32, requires_grad=True),
        pd.Series(WANTED, index=[9, 8, 7, 6]),
        pd.Series(WANTED, dtype="Int64"),
        pa.array(WANTED),
        pa.chunked_array([WANTED[:1], WANTED[1:]]),
    ],
    ids=lambda source: type(source).__name__,
)
def test_reads_what_people_have(source):
    lengths = read_lengths(source)
    assert lengths.dtype.kind in "iu"
    assert lengths.tolist() == WANTED


@pytest.mark.parametrize(
    ("source", "wanted"), [(range(3, 9, 2), [3, 5, 7]), ([], []), (np.array([]), []), (torch.tensor([]), [])]
)
def test_ranges_and_empty_sequences(source, wanted):
    assert read_lengths(source).tolist() == wanted


def test_memory_mapped_file(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array(WANTED, dtype=np.int32))
    assert read_lengths(np.load(tmp_path / "lengths.npy", mmap_mode="r")).tolist() == WANTED


DATASET = Dataset.from_dict({"length": list(range(100, 200)), "text": ["x"] * 100})


@pytest.mark.parametrize(
    "dataset",
    [
        DATASET,
        DATASET.select([7, 3, 3, 99]),
        DATASET.select(range(10, 20)),
        DATASET.shuffle(seed=1),
        DATASET.shuffle(seed=1).select(range(5)).select([4, 0]),
        DATASET.shuffle(seed=2).with_format("torch"),
        DATASET.shuffle(seed=2).with_format("numpy"),
        DATASET.select([]),
        Dataset.from_dict({"length": [1.0, 2.0]}),
    ],
)
def test_datasets_column_as_its_own_iteration_has_it(dataset):
    assert read_lengths(dataset["length"]).tolist() == [int(length) for length in dataset["length"]]


def test_datasets_column_is_read_from_the_table_and_not_row_by_row(monkeypatch):
    column = DATASET.shuffle(seed=1)["length"]
    wanted = list(column)

    def refuse(self):
        raise AssertionError("read row by row")

    monkeypatch.setattr(type(column), "__iter__", refuse)
    assert read_lengths(column).tolist() == wanted


def test_datasets_column_behind_a_transform_is_what_the_transform_makes_of_it():
    dataset = DATASET.with_transform(lambda batch: {"length": [length + 1 for length in batch["length"]]})
    assert read_lengths(dataset["length"]).tolist() == list(range(101, 201))


def test_streaming_column_is_iterated():
    assert read_lengths(DATASET.to_iterable_dataset()["length"]).tolist() == list(range(100, 200))


@pytest.mark.parametrize(
    ("source", "index", "value", "why"),
    [
        ([5, -1, 7], 1, "-1", "negative"),
        (np.array([5, 6, -3, -4]), 2, "-3", "negative"),
        ([3, "12", -1], 1, "'12'", "text"),
        (["12", "13"], 0, "'12'", "text"),
        (np.array(["12", "13"]), 0, "'12'", "text"),
        ([1, 2.5], 1, "2.5", "not a whole number"),
        (np.array([1.0, 2.0, 0.5]), 2, "0.5", "not a whole number"),
        (torch.tensor([1.0, 2.5]), 1, "2.5", "not a whole number"),
        ([1, float("nan")], 1, "nan", "not a whole number"),
        (np.array([1, np.nan]), 1, "nan", "not a whole number"),
        (np.array([1, np.inf], dtype=np.float16), 1, "inf", "longer than any row"),
        ([1, True], 1, "True", "boolean"),
        (np.array([True, False]), 0, "True", "boolean"),
        (torch.tensor([True, False]), 0, "True", "boolean"),
        ([4, None], 1, "None", "not a number"),
        ([4, 1 + 0j], 1, "(1+0j)", "not a number"),
        (pd.Series([4, None], dtype="Int64"), 1, "nan", "not a whole number"),
        (pa.array([4, None]), 1, "nan", "not a whole number"),
        ([[1, 2], [3]], 0, "[1, 2]", "nested"),
        ([4, [3]], 1, "[3]", "nested"),
        (np.array([[1, 2], [3, 4]]), 0, "array([1, 2])", "nested"),
        ([1, 2**31], 1, "2147483648", "longer than any row"),
        ([1, 2**64], 1, "18446744073709551616", "longer than any row"),
        (np.array([1, 2**63], dtype=np.uint64), 1, "9223372036854775808", "longer than any row"),
    ],
)
def test_nonsense_names_the_first_bad_index_and_its_value(source, index, value, why):
    with pytest.raises(LengthsError, match=re.escape(f"lengths[{index}] is {value}, ") + f".*{why}") as caught:
        read_lengths(source)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("source", ["123", b"123", {"a": 1}, {1, 2}, 7, None, object()])
def test_what_is_no_sequence(source):
    with pytest.raises(LengthsError, match=f"must be a sequence of numbers, got {type(source).__name__}"):
        read_lengths(source)


@pytest.mark.parametrize("source", [torch.tensor(7), np.array(7)])
def test_a_single_number_is_no_sequence(source):
    with pytest.raises(LengthsError, match="one single 7"):
        read_lengths(source)


@pytest.mark.parametrize("source", [[0], [0, 0, 0], np.zeros(3), torch.zeros(3)])
def test_zero_throughout(source):
    with pytest.raises(LengthsError, match="all zero"):
        read_lengths(source)


def test_count():
    assert read_lengths([1, 2], count=2).tolist() == [1, 2]
    with pytest.raises(LengthsError, match="2 lengths for 3 samples"):
        read_lengths([1, 2], count=3)
    with pytest.raises(LengthsError, match="0 lengths for 3 samples"):
        read_lengths([], count=3)


def loads_torch(code):
    script = f"import sys\n{code}\nprint('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return ended.stdout.strip() == "True"


def test_lengths_and_packing_do_not_import_torch():
    assert not loads_torch(
        "import budgetdb.sampling as sampling\n"
        "import budgetdb.sampling.sharding\n"
        "sampling.plan_batches(sampling.read_lengths([3, 4]), max_rows=lambda padded: 8 // padded)"
    )


def test_the_torch_check_can_fail():
    assert loads_torch("import budgetdb.sampling\nbudgetdb.sampling.TokenBudgetBatchSampler")


def test_package_lists_its_names_and_refuses_others():
    import budgetdb.sampling as sampling

    assert {name for name in sampling.__all__ if getattr(sampling, name).__name__ == name} == set(sampling.__all__)
    assert set(sampling.__all__) <= set(dir(sampling))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        sampling.Nothing  # noqa: B018  # the access is the test
