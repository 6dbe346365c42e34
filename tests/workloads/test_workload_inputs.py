import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import TINY, tiny_config, tiny_spec
from transformers import BertModel

from budgetdb.errors import UnknownNameError, UsageError
from budgetdb.models.load import outline_model
from budgetdb.plugins import WORKLOADS
from budgetdb.shapes import Shape
from budgetdb.workloads.base import HOLDS, Workload, parse_workload
from budgetdb.workloads.forward import ForwardWorkload
from budgetdb.workloads.tokens import random_ids

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["embed", "forward", "loss"])
@pytest.mark.parametrize("hold", HOLDS)
def test_keys_come_back(name: str, hold: str) -> None:
    workload = parse_workload(name, hold=hold)
    assert workload.key() == f"{name}[hold={hold}]"
    again = parse_workload(workload.key())
    assert (type(again), again.key()) == (type(workload), workload.key())
    assert isinstance(workload, WORKLOADS.get(name))


def test_options_stand_sorted_in_the_key_and_come_back_as_text() -> None:
    class Scored(ForwardWorkload):
        name = "scored"

        def __init__(self, *, hold: str = "previous", answers: str | int = 4) -> None:
            super().__init__(hold=hold)
            self.answers = int(answers)

        def options(self) -> dict[str, str]:
            return super().options() | {"answers": str(self.answers)}

    WORKLOADS.register("scored")(Scored)
    try:
        assert parse_workload("scored", answers="2").key() == "scored[answers=2,hold=previous]"
        assert parse_workload("scored[answers=8]").key() == "scored[answers=8,hold=previous]"
    finally:
        WORKLOADS.unregister("scored")


@pytest.mark.parametrize(
    ("key", "kind", "message"),
    [
        ("foward", UnknownNameError, "unknown workload 'foward'. Did you mean 'forward'?"),
        ("forward[hold=previuos]", UnknownNameError, "unknown hold 'previuos'. Did you mean 'previous'?"),
        ("forward[holds=all]", UnknownNameError, "unknown option of workload 'forward' 'holds'. Did you mean 'hold'?"),
        ("forward[hold]", UsageError, "'hold' in 'forward[hold]' is no option. Write options like hold=previous"),
        ("forward[hold=all", UsageError, "'forward[hold=all' names no workload. Write it like forward[hold=previous]"),
        ("", UsageError, "'' names no workload. Write it like forward[hold=previous]"),
    ],
)
def test_what_is_no_key(key: str, kind: type[UsageError], message: str) -> None:
    with pytest.raises(kind) as caught:
        parse_workload(key)
    assert str(caught.value) == message


def test_a_workload_can_not_be_made_without_its_parts() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Workload()  # type: ignore[abstract]  # what is tested


@pytest.mark.parametrize("name", TINY)
def test_inputs_are_equal_for_equal_shapes_and_have_one_padded_token(name: str, tmp_path: Path) -> None:
    model = outline_model(tiny_spec(name, tmp_path))
    for workload in map(parse_workload, ("forward", "embed")):
        first, second = (workload.inputs(model, Shape(3, 7), CPU) for _ in range(2))
        assert all(torch.equal(first[part], second[part]) for part in first)
        assert first["attention_mask"].tolist() == [[1] * 6 + [0]] * 3
        assert workload.inputs(model, Shape(3, 1), CPU)["attention_mask"].tolist() == [[1]] * 3


def test_other_shapes_have_other_tokens_and_rows_differ() -> None:
    model = BertModel(tiny_config("bert"))
    ids = random_ids(model, Shape(4, 30))
    assert len({tuple(row) for row in ids.tolist()}) == 4
    assert not torch.equal(ids[:2], random_ids(model, Shape(2, 30)))


def test_every_token_but_the_special_ones_occurs() -> None:
    model = BertModel(tiny_config("bert", vocab_size=12, pad_token_id=0, eos_token_id=5, bos_token_id=11))
    assert set(random_ids(model, Shape(20, 50)).flatten().tolist()) == set(range(12)) - {0, 5, 11}


@given(vocab_size=st.integers(1, 8), special=st.sets(st.integers(0, 9), max_size=3))
def test_tokens_stay_in_the_vocabulary(vocab_size: int, special: set[int]) -> None:
    names = ("bos_token_id", "eos_token_id", "sep_token_id")
    with torch.device("meta"):
        model = BertModel(
            tiny_config("bert", vocab_size=vocab_size, pad_token_id=None, **dict(zip(names, special, strict=False)))
        )
    ids = random_ids(model, Shape(3, 20))
    assert ((ids >= 0) & (ids < vocab_size)).all()
    if len(special & set(range(vocab_size))) < vocab_size:
        assert not special & set(ids.flatten().tolist())


def test_inputs_are_made_on_the_device_asked_for() -> None:
    inputs = ForwardWorkload().inputs(BertModel(tiny_config("bert")), Shape(2, 4), torch.device("meta"))
    assert {tensor.device.type for tensor in inputs.values()} == {"meta"}


def test_two_processes_make_equal_inputs() -> None:
    code = (
        "from budgetdb.workloads.tokens import random_ids; from budgetdb.shapes import Shape\n"
        "print(random_ids(lambda input_ids: input_ids, Shape(2, 8)).tolist())"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert made.stdout.strip() == str(random_ids(lambda input_ids: input_ids, Shape(2, 8)).tolist())
