"""What names a model, and what is known of one: plain values that travel as JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", protected_namespaces=())


class ModelSpec(_Value):
    """All a process needs to build the model: `load_model(ModelSpec.model_validate_json(text), device)`.

    Attributes:
        source: name on the model hub, a local directory, or the path of a `config.json`.
        weights: `pretrained`, `random`, or `auto`: pretrained where the files are at hand, else random. Memory does not
            depend on their values.
        dtype: `auto` for what the configuration says (float32 where it says nothing), or the name of a float type.
        attention: attention implementation, None for what transformers chooses.
        head: `auto` for the class that the configuration names, `base` for none, or the task.
        trust_remote_code: whether code that comes with the model may run.
    """

    source: str = Field(min_length=1)
    weights: Literal["auto", "random", "pretrained"] = "auto"
    dtype: str = "auto"
    attention: str | None = None
    head: str = "auto"
    trust_remote_code: bool = False


class ModelFacts(_Value):
    """What a calibration needs to know of a model.

    Attributes:
        model_hash: fingerprint of the structure.
        name: for people.
        dtype: of the parameters, most bytes win, as torch spells it without `torch.`; `none` without parameters.
        attention: attention implementation, or `none`.
        resident_bytes: parameters and buffers, tied ones once.
        max_positions: the longest input it takes, or None where nothing ends it.
        heads: the largest number of attention heads in a layer.
        vocab_size: token ids are below it.
        output_width: numbers it returns per token in its widest output, the vocabulary for a language-model head.
        flags: `mixture_of_experts`, `quantized`.
    """

    model_hash: str
    name: str
    dtype: str
    attention: str
    resident_bytes: int
    max_positions: int | None = None
    heads: int | None = None
    vocab_size: int | None = None
    output_width: int | None = None
    is_encoder_decoder: bool = False
    flags: tuple[str, ...] = ()
