import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling.test_sampler import MIXED, PROFILE

from budgetdb.profiles import Outcome, Probe
from budgetdb.sampling import ProfileBatchSampler
from budgetdb.sampling.times import TimeModel


def probe(rows, length, seconds):
    return Probe(batch_size=rows, length=length, outcome=Outcome.FITS, peak_allocated_bytes=1, elapsed_s=seconds)


SHAPES = [(1, 16), (64, 16), (1, 512), (16, 512), (4, 2048)]


def test_an_epoch_with_less_free_memory_has_smaller_batches_and_one_with_more_has_them_back():
    shrunk = PROFILE.model_copy(update={"limit_bytes": 1_700_000})
    answers = iter([shrunk, shrunk, None, PROFILE])
    sampler = ProfileBatchSampler(MIXED, PROFILE, refresh=lambda: next(answers))
    at_first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) == list(ProfileBatchSampler(MIXED, shrunk))
    assert len(sampler) > len(at_first)
    for epoch in (2, 3):
        sampler.set_epoch(epoch)
        assert len(sampler) == len(ProfileBatchSampler(MIXED, shrunk))
    sampler.set_epoch(4)
    assert list(sampler) == at_first


@settings(max_examples=50)
@given(st.floats(0.005, 0.1), st.floats(1e-6, 1e-4), st.floats(0, 1e-8), st.integers(0, 2**32 - 1))
def test_seconds_of_probes_are_found_again_within_their_noise(step_s, token_s, square_s, seed):
    truth, random = TimeModel(step_s, token_s, square_s), np.random.default_rng(seed)
    sizes, lengths = np.array(SHAPES).T
    exact = truth.batch_seconds(sizes, lengths)
    noisy = exact * random.uniform(0.95, 1.05, len(exact))
    fitted = TimeModel.fit([probe(*shape, seconds) for shape, seconds in zip(SHAPES, noisy.tolist(), strict=True)])
    assert fitted is not None
    assert fitted.batch_seconds(sizes, lengths) == pytest.approx(exact, rel=0.15)


@pytest.mark.parametrize(
    "probes",
    [[], [probe(1, 16, 0.1)], [probe(1, 16, 0.0), probe(8, 64, 0.0)], [probe(1, 16, 0.1), probe(64, 512, 0.1)]],
)
def test_too_few_probes_or_seconds_that_do_not_grow_tell_nothing(probes):
    assert TimeModel.fit(probes) is None


def test_no_coefficient_is_negative_however_the_clock_went():
    fitted = TimeModel.fit([probe(1, 16, 0.5), probe(64, 16, 0.4), probe(16, 512, 0.9)])
    assert fitted is not None
    assert min(fitted.step_s, fitted.token_s, fitted.square_s) >= 0
