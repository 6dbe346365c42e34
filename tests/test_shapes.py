import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetdb.shapes import Shape, padded_length


@given(length=st.integers(0, 10**9), pad_multiple=st.integers(1, 10**4))
def test_padding_reaches_the_next_multiple(length: int, pad_multiple: int) -> None:
    padded = padded_length(length, pad_multiple)
    assert padded % pad_multiple == 0
    assert padded >= max(length, 1)
    assert padded - pad_multiple < max(length, 1)


def test_nothing_is_padded_by_default() -> None:
    assert [padded_length(length) for length in (0, 1, 2, 513)] == [1, 1, 2, 513]


def test_a_shape_knows_its_tokens_and_its_order() -> None:
    assert Shape(3, 7).tokens == 21
    assert Shape(2, 9) < Shape(3, 1)
    assert {Shape(2, 9), Shape(2, 9)} == {Shape(2, 9)}


def test_a_shape_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Shape(1, 2).length = 3  # type: ignore[misc]  # what is tested
