"""The largest of a trace's moments, and a trace brought into line with a device."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetdb.costs.calibrated import CalibratedCost, ScaledTrace
from budgetdb.costs.exact import ExactCost, Form
from budgetdb.costs.forms import UNLIMITED
from budgetdb.profiles import CostRecord, Outcome, Probe
from budgetdb.shapes import Shape
from budgetdb.testing.costs import check_model

MIB = 2**20
BERT = (
    Form(1, 0, c=0, k=0, l=520, kl=16_912, ll=0, kll=26),
    Form(1, 0, c=0, k=0, l=0, kl=7_696, ll=0, kll=50.5),
)
WINDOWED = (
    Form(1, 127, c=100, k=8, l=0, kl=40, ll=0, kll=3),
    Form(121, 0, c=100, k=8, l=0, kl=90, ll=16, kll=1),
    Form(1, 0, c=0, k=-20, l=0, kl=20, ll=0, kll=0),  # labels shifted by one
)
coefficient = st.integers(0, 2000).map(lambda n: n / 2)


def forms() -> st.SearchStrategy[tuple[Form, ...]]:
    one = st.builds(Form, st.just(1), st.just(0), *[coefficient] * 6)
    return st.lists(one, min_size=1, max_size=4).map(tuple)


def probe(cost: ExactCost | CalibratedCost, shape: Shape, *, peak: int | None = None, baseline: int = 0) -> Probe:
    return Probe(
        batch_size=shape.batch_size,
        length=shape.length,
        outcome=Outcome.FITS,
        peak_allocated_bytes=cost.peak_bytes(shape) if peak is None else peak,
        baseline_bytes=baseline,
    )


@given(forms(), st.integers(1, 500), st.integers(0, 10**9))
def test_the_inverse_is_exact(made: tuple[Form, ...], length: int, limit: int) -> None:
    cost = ExactCost(made)
    size = cost.max_batch_size(length, limit)
    assert size == 0 or cost.peak_bytes(Shape(size, length)) <= limit
    if size < UNLIMITED:
        assert cost.peak_bytes(Shape(size + 1, length)) > limit
    assert cost.max_batch_sizes([length], limit).tolist() == [size]


@pytest.mark.parametrize("made", [BERT, WINDOWED], ids=["bert", "windowed"])
def test_a_peak_never_falls_and_is_stored_whole(made: tuple[Form, ...]) -> None:
    cost = ExactCost(made)
    for rows in (0, 1, 2, 7, 300):
        peaks = [cost.peak_bytes(Shape(rows, length)) for length in range(1, 400)]
        assert rows == 0 or peaks == sorted(peaks)
    for length in (1, 120, 121, 127, 128, 399):
        peaks = [cost.peak_bytes(Shape(rows, length)) for rows in range(50)]
        assert peaks == sorted(peaks)
    record = CostRecord.model_validate_json(cost.record().model_dump_json())
    assert record.model == cost
    assert json.dumps(record.parameters)
    assert cost.max_batch_sizes([1, 120, 121, 399], 10**6).tolist() == [
        cost.max_batch_size(length, 10**6) for length in (1, 120, 121, 399)
    ]


@pytest.mark.parametrize(
    "spoiled",
    [
        BERT[0]._replace(kll=-1.0),
        BERT[0]._replace(kl=-1.0),
        BERT[0]._replace(c=-1000.0),
        BERT[0]._replace(c=float("nan")),
        BERT[0]._replace(kl=10.0, k=-11.0, kll=0.0),
    ],
)
def test_what_falls_or_is_no_number_is_refused(spoiled: Form) -> None:
    with pytest.raises(ValueError, match="form"):
        ExactCost([spoiled])


def test_a_form_from_length_one_on_is_needed_and_parameters_are_checked() -> None:
    with pytest.raises(ValueError, match="length 1"):
        ExactCost([BERT[0]._replace(first=8.0)])
    for parameters in ({}, {"forms": 1.0}, {"forms": [[1.0, 2.0]]}, {"forms": [list(BERT[0])], "more": 1.0}):
        with pytest.raises(ValueError, match=r"exact|form"):
            ExactCost.from_parameters(parameters)


def test_three_probes_recover_what_a_device_adds() -> None:
    # TRACING 6: a device that takes 1 % and 32 MiB and 700 bytes a token more
    trace = ScaledTrace(BERT, 200 * MIB)
    device = CalibratedCost(BERT, c=232 * MIB, s=1.01, d=700)
    probes = [probe(device, shape, baseline=200 * MIB) for shape in (Shape(1, 128), Shape(8, 512), Shape(64, 64))]
    fitted = trace.fit(probes)
    for rows, length in ((1, 2048), (300, 16), (16, 400), (5, 1000)):
        shape = Shape(rows, length)
        assert fitted.peak_bytes(shape) == pytest.approx(device.peak_bytes(shape), rel=0.002)
    error = trace.leave_one_out([*probes, probe(device, Shape(3, 900), baseline=200 * MIB)])
    assert error is not None
    assert error < 0.02
    assert trace.leave_one_out(probes[:2]) is None


def test_noisy_probes_are_never_above_the_fit() -> None:
    trace, rng = ScaledTrace(BERT, 200 * MIB), random.Random(0)
    for _ in range(50):
        device = CalibratedCost(BERT, c=rng.uniform(200, 260) * MIB, s=rng.uniform(0.8, 1.3), d=rng.uniform(0, 2000))
        shapes = [Shape(rng.randint(1, 200), 8 * rng.randint(1, 64)) for _ in range(rng.randint(1, 5))]
        probes = [
            probe(device, shape, peak=int(device.peak_bytes(shape) * rng.uniform(1, 1.03)), baseline=200 * MIB)
            for shape in shapes
        ]
        fitted = trace.fit(probes)
        assert all(fitted.peak_bytes(one.shape) >= one.peak_bytes for one in probes)
        assert CalibratedCost.from_parameters(fitted.parameters()) == fitted
    with pytest.raises(ValueError, match="no probe fitted"):
        trace.fit([])


def test_one_probe_scales_the_trace() -> None:
    trace = ScaledTrace(BERT, 200 * MIB)
    device = CalibratedCost(BERT, c=200 * MIB, s=1.05)
    fitted = trace.fit([probe(device, Shape(40, 256), baseline=200 * MIB)])
    assert fitted.peak_bytes(Shape(40, 256)) >= device.peak_bytes(Shape(40, 256))
    assert fitted.peak_bytes(Shape(20, 512)) == pytest.approx(device.peak_bytes(Shape(20, 512)), rel=0.05)


signed = st.integers(-60, 60).map(lambda n: n / 2)


@given(
    st.builds(Form, st.integers(1, 40), st.just(0), st.integers(-50, 5000), *[signed] * 5),
    st.integers(0, 60),
    st.lists(st.integers(0, 50), min_size=2, max_size=4),
)
def test_a_form_that_is_let_through_is_never_negative_and_never_falls(form: Form, more: int, rows: list[int]) -> None:
    form = form._replace(last=float(form.first + more) if more else 0.0)
    try:
        form.check()
    except ValueError:
        return
    lengths = range(int(form.first), int(form.first) + 80)
    for k in rows:
        bytes_of = [line[0] + k * line[1] for line in map(form.line, lengths) if line is not None]
        assert bytes_of[0] >= 0
        assert bytes_of == sorted(bytes_of)
    for length in lengths:
        line = form.line(length)
        assert line is not None
        assert line[1] >= 0


@given(forms(), st.floats(0.5, 2), st.integers(0, 2000), st.integers(0, 2**34))
@settings(max_examples=15)
def test_exact_and_calibrated_models_keep_the_contract(
    made: tuple[Form, ...], factor: float, per_token: int, constant: int
) -> None:
    check_model(ExactCost(made))
    check_model(CalibratedCost(made, c=constant, s=factor, d=per_token))
