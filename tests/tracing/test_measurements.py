"""Peaks that others measured on GPUs, beside predicted ones; see tests/measurements/README.md."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from published_measurements import SOURCES, Source, compare

from budgetdb.shapes import Shape

GPT2, BERT, LLAMA = SOURCES
MEDIAN_ERROR, WORST_ERROR = 0.02, 0.05
# Enough of each table to see it grow with rows and with length.
SOME = {
    GPT2.file: [Shape(1, 128), Shape(1, 768), Shape(4, 256)],
    BERT.file: [Shape(1, 128), Shape(1, 256), Shape(4, 256)],
    LLAMA.file: [Shape(1, 256), Shape(8, 256), Shape(32, 256)],
}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.file)
def test_growth_is_as_published(source: Source) -> None:
    comparison = next(iter(compare(source, shapes=SOME[source.file])))
    errors = [abs(error) for error in comparison.errors()]
    assert len(errors) == 3
    assert median(errors) <= MEDIAN_ERROR
    assert max(errors) <= WORST_ERROR


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.file)
def test_growth_is_as_published_in_every_row(source: Source) -> None:
    for comparison in compare(source):
        errors = [abs(error) for error in comparison.errors()]
        assert median(errors) <= MEDIAN_ERROR, comparison.name
        assert max(errors) <= WORST_ERROR, comparison.name
