"""The cost of a step from traces alone, of thirty families of models, to the byte."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench_families import check

# Encoders, decoders, both; learned, rotary and relative positions; windows, experts, shared and grouped heads.
FAMILIES = (
    *(("bert", "masked-lm", "sdpa"), ("roberta", "masked-lm", "eager"), ("albert", "masked-lm", "sdpa")),
    *(("distilbert", "masked-lm", "eager"), ("electra", "masked-lm", "sdpa"), ("modernbert", "masked-lm", "sdpa")),
    *(("mpnet", "masked-lm", "eager"), ("convbert", "masked-lm", "eager"), ("esm", "masked-lm", "sdpa")),
    *(("gpt2", "causal-lm", "sdpa"), ("gpt_neo", "causal-lm", "eager"), ("gpt_neox", "causal-lm", "sdpa")),
    *(("gptj", "causal-lm", "eager"), ("opt", "causal-lm", "sdpa"), ("bloom", "causal-lm", "eager")),
    *(("llama", "causal-lm", "eager"), ("mistral", "causal-lm", "sdpa"), ("qwen2", "causal-lm", "sdpa")),
    *(("qwen3", "causal-lm", "eager"), ("gemma2", "causal-lm", "eager"), ("phi3", "causal-lm", "sdpa")),
    *(("mixtral", "causal-lm", "sdpa"), ("olmo2", "causal-lm", "eager"), ("granite", "causal-lm", "sdpa")),
    *(("cohere", "causal-lm", "eager"), ("stablelm", "causal-lm", "sdpa"), ("mpt", "causal-lm", "eager")),
    *(("t5", "seq2seq-lm", "eager"), ("bart", "seq2seq-lm", "sdpa"), ("pegasus", "seq2seq-lm", "eager")),
)
# None of them a shape that the cost is made of or checked with.
HELD_OUT = ((1, 24), (48, 120), (3, 504))


@pytest.mark.parametrize(("family", "head", "attention"), FAMILIES)
def test_the_cost_of_a_family_is_exact(family: str, head: str, attention: str) -> None:
    finding = check(family, head, attention, aligned=HELD_OUT, others=())
    assert (finding.verdict, finding.worst_bytes) == ("exact", 0), finding.reason


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_at_lengths_that_kernels_pad_the_cost_is_an_upper_bound(attention: str) -> None:
    finding = check("bert", "masked-lm", attention, aligned=HELD_OUT, others=((3, 77), (7, 334), (2, 509)))
    assert finding.verdict == "exact"
    assert 0 <= finding.least_others <= finding.most_others < 0.02


def test_a_family_that_is_not_built_says_why() -> None:
    finding = check("funnel", "masked-lm", "sdpa")
    assert (finding.verdict, finding.reason) == ("not built", "has no sdpa")
