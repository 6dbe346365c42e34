"""Which attention implementations there are, and which of them a model runs with."""

from __future__ import annotations

from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available

from budgetdb.errors import UnknownNameError


def check_attention_name(attention: str | None) -> None:
    """Raise `UnknownNameError` for a name that transformers knows no attention implementation by."""
    # A name with a slash is a kernel on the hub: only transformers can tell whether it exists.
    if attention is None or "/" in attention:
        return
    known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if attention not in known:
        raise UnknownNameError("attention implementation", attention, [name for name in known if "|" not in name])


def supported_attention(model_class: Any) -> list[str]:
    """Names of the attention implementations that a class of transformers runs with on this machine."""
    supports = {
        "eager": True,
        "sdpa": model_class._supports_sdpa,
        "flex_attention": model_class._supports_flex_attn,
        "flash_attention_2": model_class._supports_flash_attn and is_flash_attn_2_available(),
    }
    return [name for name, supported in supports.items() if supported]
