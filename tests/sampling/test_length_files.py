import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from budgetdb.errors import LengthsError
from budgetdb.sampling.length_files import read_length_file
from budgetdb.sampling.lengths import count_tokens, read_lengths

WANTED = [5, 1, 7]
IDS = [[1] * length for length in WANTED]
TEXTS = ["a b c d e", "a", "a b c d e f g"]


def by_space(texts, **options):
    return {"input_ids": [text.split() for text in texts]}


def written(tmp_path, name, content):
    path = tmp_path / name
    if name.endswith(".npy"):
        np.save(path, content)
    elif name.endswith(".parquet"):
        pq.write_table(pa.table(content), path)
    else:
        path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("lengths.txt", "5\n1\n\n7\n"),
        ("lengths.npy", np.array(WANTED, dtype=np.uint16)),
        ("lengths.json", json.dumps(WANTED)),
        ("lengths.jsonl", "5\n1\n7\n"),
        ("ids.json", json.dumps(IDS)),
        ("ids.jsonl", "\n".join(json.dumps({"id": 3, "input_ids": ids}) for ids in IDS)),
        ("rows.jsonl", "\n".join(json.dumps({"input_ids": [0], "length": length}) for length in WANTED)),
        ("lengths.parquet", {"text": TEXTS, "length": WANTED}),
        ("ids.parquet", {"id": [1, 2, 3], "input_ids": IDS}),
        ("text.parquet", {"text": TEXTS}),
        ("text.jsonl", "\n".join(json.dumps({"text": text}) for text in TEXTS)),
    ],
)
def test_files_people_have(tmp_path, name, content):
    assert read_length_file(written(tmp_path, name, content), tokenizer=by_space).tolist() in (WANTED, [1, 1, 1])
    if not name.startswith(("text", "lengths.txt")):
        assert read_length_file(written(tmp_path, name, content)).tolist() == WANTED


def test_raw_text_and_a_named_column(tmp_path):
    assert read_length_file(written(tmp_path, "raw.txt", "\n".join(TEXTS)), tokenizer=by_space).tolist() == WANTED
    file = written(tmp_path, "two.parquet", {"length": [9, 9, 9], "n": WANTED})
    assert read_length_file(file, column="n").tolist() == WANTED


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "5\nx\n", "line 2 is 'x', and no number of tokens"),
        ("a.txt", "5\n-1\n", "lengths[1] is -1, which is negative"),
        ("a.jsonl", "5\n{\n", "line 2 is no JSON"),
        ("a.json", '{"length": 3}', "it is no array"),
        ("a.jsonl", '{"tokens": 5}\n', "there is no length or input_ids or text among tokens"),
        ("a.parquet", {"text": TEXTS}, "it holds texts. Give --tokenizer NAME"),
        ("a.parquet", {"other": WANTED}, "there is no length or input_ids or text among other"),
    ],
)
def test_what_is_no_length_is_said_with_its_place(tmp_path, name, content, said):
    path = written(tmp_path, name, content)
    with pytest.raises(LengthsError, match=re.escape(f"{path}: {said}")):
        read_length_file(path)


@pytest.mark.parametrize("name", ["a.npy", "a.parquet"])
def test_files_that_are_something_else(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"no such thing")
    with pytest.raises(LengthsError, match="can't be read"):
        read_length_file(path)


def test_tokens_are_counted_in_batches_and_nonsense_named():
    texts = TEXTS * 700
    assert count_tokens(iter(texts), by_space, progress=False).tolist() == WANTED * 700
    assert count_tokens(TEXTS, lambda texts: [text.split() for text in texts]).tolist() == WANTED
    with pytest.raises(LengthsError, match=r"texts\[1001\] is None, and no text"):
        count_tokens(["a"] * 1001 + [None], by_space)
    with pytest.raises(LengthsError, match="made 1 rows of 3 texts"):
        count_tokens(TEXTS, lambda texts: [[1]])


def test_whole_datasets_and_tables():
    from datasets import Dataset

    dataset = Dataset.from_dict({"input_ids": IDS, "label": [0, 1, 0]})
    assert read_lengths(dataset).tolist() == WANTED
    assert read_lengths(dataset.select([2, 0])).tolist() == [7, 5]
    assert read_lengths(dataset.with_format("torch")).tolist() == WANTED
    assert read_lengths(dataset.add_column("length", [4, 4, 4])).tolist() == [4, 4, 4]
    assert read_lengths(pa.table({"length": WANTED})).tolist() == WANTED
    assert read_lengths(pa.table({"input_ids": IDS}).column("input_ids")).tolist() == WANTED
    with pytest.raises(LengthsError, match="there is no column length or input_ids among label"):
        read_lengths(dataset.remove_columns("input_ids"))
    with pytest.raises(LengthsError, match=re.escape("lengths[1] is nan")):
        read_lengths(pa.table({"length": [1, None]}))


def test_memory_maps(tmp_path):
    np.save(tmp_path / "a.npy", np.array(WANTED, dtype=np.uint16))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert read_lengths(mapped).dtype == np.uint16
    assert read_lengths(mapped).tolist() == WANTED
