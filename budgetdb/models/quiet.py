"""Keep transformers from writing to the terminal while a model loads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars, no load reports, no warnings of transformers inside; what was set before is set again after.

    A missing head or an unused key is no news here: memory does not depend on it. The settings are the process's own,
    so this is not for several threads at once.
    """
    verbosity = transformers_logging.get_verbosity()
    hub_bars, loading_bars = not are_progress_bars_disabled(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if loading_bars:
            transformers_logging.enable_progress_bar()
        (enable_progress_bars if hub_bars else disable_progress_bars)()
