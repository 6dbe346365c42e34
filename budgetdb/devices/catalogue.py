"""Cards that are known without having one: their memory, compute capability and what a process costs on them.

`profiles/devices.json` holds them, and ships with the package. One entry::

    {
      "name": "NVIDIA L40S",                    as torch.cuda.get_device_name() reports it
      "aliases": ["L40S 48GB"],                 what people type, beside the name
      "total": {                                as torch.cuda.get_device_properties().total_memory reports it, on Linux
        "bytes": 47576711168,
        "exact": true,                          read off this very card; false where it is derived from another figure
        "precision_bytes": 0,                   how far off it may be: by the rounding of what was printed, and for a
                                                derived one by as much as cards so alike have been seen apart
        "basis": "47576711168 bytes",           what the source says, or the rule it is derived by
        "source": "https://..."
      },
      "compute_capability": "8.9",              gfx name for AMD
      "capability_source": "https://...",
      "context": {"bytes": ..., ...}            what a process holds outside the allocator; the same fields
    }

Bytes are not the marketing size: a driver keeps 16 MiB (AMD) to 0.9 GiB (A100) for itself, ECC takes its share, and
Windows reports more than Linux. Drivers differ among themselves by up to 1.4 % (a T4 has been seen at 14.56 to 14.76
GiB), which `precision_bytes` does not cover; where several were seen, the entry has the smaller or the newer.
Where a figure was found in public code by its text alone, the source is a search for that text.

`ambiguous` lists the names that stand for several cards: short ones (`A100`), and names that a driver gives to two
cards of different memory (an RTX 4060 Ti of 8 and one of 16 GiB; vllm#28349).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache, cached_property
from importlib.resources import files
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from budgetdb.devices.info import DeviceInfo
from budgetdb.errors import UnknownNameError, UsageError
from budgetdb.profiles import Count, Name, Positive
from budgetdb.settings import format_bytes

Source = Annotated[str, Field(pattern=r"^https://\S+$", max_length=512)]
_CAPABILITY = r"^(\d{1,2}\.\d|gfx\d{1,2}[0-9a-f]{2})$"
Capability = Annotated[str, Field(pattern=_CAPABILITY)]
_DESCRIBE = "can be described: --memory 48GiB --capability 8.9"
_VENDOR_WORDS = re.compile(r"\b(nvidia|geforce|tesla|quadro|amd|instinct)\b")


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Figure(_Entry):
    """A number of bytes and where it comes from; the fields are described at the top of this module."""

    bytes: Positive
    exact: bool
    precision_bytes: Count
    basis: Name
    source: Source | None = None


class CatalogueCard(_Entry):
    """A kind of card, as the catalogue or the user describes it.

    Attributes:
        name: as torch reports it.
        aliases: other names it is found by; at least one name is shared with no other card.
        compute_capability: `9.0` and the like; the gfx name for AMD.
        total: its memory.
        context: what one process holds on it outside the allocator, before workspaces: an estimate nearly always.
    """

    name: Name
    aliases: tuple[Name, ...] = ()
    compute_capability: Capability
    capability_source: Source | None = None
    total: Figure
    context: Figure

    @property
    def total_bytes(self) -> int:
        """All its memory, as torch reports it."""
        return self.total.bytes

    @property
    def context_bytes(self) -> int:
        """What one process holds on it outside the allocator."""
        return self.context.bytes

    def info(self) -> DeviceInfo:
        """The card as a device on this machine would describe itself; runtime and driver are unknown."""
        return DeviceInfo(
            name=self.name, total_bytes=self.total_bytes, compute_capability=_as_torch_says(self.compute_capability)
        )


class Catalogue(_Entry):
    """All known cards.

    Attributes:
        ambiguous: the names and aliases that stand for more than one card, and are meant to.
    """

    schema_version: Annotated[int, Field(ge=1, le=1)]
    ambiguous: tuple[Name, ...]
    cards: tuple[CatalogueCard, ...]

    @model_validator(mode="after")
    def _names_lead_to_one_card(self) -> Self:
        shared = {term for term, cards in self._by_term.items() if len(cards) > 1}
        declared = {_term(name) for name in self.ambiguous}
        if shared != declared:
            raise ValueError(f"names shared or declared ambiguous, but not both: {sorted(shared ^ declared)}")
        lost = [card.name for card in self.cards if not self.own_names(card)]
        if lost:
            raise ValueError(f"cards without a name of their own: {lost}")
        return self

    @cached_property
    def _by_term(self) -> dict[str, list[CatalogueCard]]:
        found: dict[str, list[CatalogueCard]] = {}
        for card in self.cards:
            for term in dict.fromkeys(map(_term, (card.name, *card.aliases))):
                found.setdefault(term, []).append(card)
        return found

    def find(self, name: str) -> CatalogueCard:
        """The card called `name`; see `find_card`."""
        cards = self._by_term.get(_term(name), [])
        if not cards:
            raise UnknownCardError(name, (own for card in self.cards for own in self.own_names(card)))
        if len(cards) > 1:
            choices = ", ".join(f"{self.own_names(card)[0]!r} ({format_bytes(card.total_bytes)})" for card in cards)
            raise UsageError(f"{name!r} stands for {len(cards)} cards", next_step=f"Name one of {choices}")
        return cards[0]

    def own_names(self, card: CatalogueCard) -> list[str]:
        """The names that lead to this card and to no other."""
        return [name for name in (card.name, *card.aliases) if len(self._by_term[_term(name)]) == 1]


class UnknownCardError(UnknownNameError):
    """No card of that name in the catalogue; the message offers the nearest ones, and how to do without."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = "card", name, sorted(set(known))
        spellings = {_term(spelling): spelling for spelling in self.known}
        near = difflib.get_close_matches(_term(name), spellings, n=3, cutoff=0.6)
        others = f"Did you mean {' or '.join(repr(spellings[term]) for term in near)}? Any other card" if near else "It"
        # Past the parent, which makes another message of the same data.
        super(UnknownNameError, self).__init__(f"unknown card {name!r}", next_step=f"{others} {_DESCRIBE}")


@cache
def load_catalogue() -> Catalogue:
    """The catalogue that ships with budgetdb, read once."""
    text = files("budgetdb.shipped_profiles").joinpath("devices.json").read_text(encoding="utf-8")
    return Catalogue.model_validate_json(text)


def find_card(name: str) -> CatalogueCard:
    """The card called `name`, which may be an alias; case, spaces, hyphens and the vendor's name don't matter.

    >>> find_card("rtx 4090").name
    'NVIDIA GeForce RTX 4090'

    Raises:
        UnknownCardError: there is none; the message offers the nearest names.
        UsageError: `name` stands for several cards; the message lists them.
    """
    return load_catalogue().find(name)


def custom_card(memory_bytes: int, capability: str, *, name: str | None = None) -> CatalogueCard:
    """A card that the user describes.

    The context is taken from the catalogue: the largest among cards of that compute capability, else among all.

    Args:
        memory_bytes: all its memory, as torch reports it.
        capability: `8.9` and the like; the gfx name for AMD.
        name: what to call it; made of the two others when it is not given.

    Raises:
        UsageError: there can be no such card; the message names the option to correct.
    """
    if not re.fullmatch(_CAPABILITY, capability):
        raise UsageError(
            f"{capability!r} is no compute capability", next_step="Write it like --capability 8.9, or gfx942 for AMD"
        )
    if memory_bytes < 1:
        raise UsageError(f"a card can't have {memory_bytes} bytes", next_step="Write it like --memory 48GiB")
    cards = load_catalogue().cards
    alike = [card.context_bytes for card in cards if card.compute_capability == capability]
    return CatalogueCard(
        name=name or f"custom card of {format_bytes(memory_bytes)}, {capability}",
        compute_capability=capability,
        total=Figure(bytes=memory_bytes, exact=True, precision_bytes=0, basis="given by the user"),
        context=Figure(
            bytes=max(alike or [card.context_bytes for card in cards]),
            exact=False,
            precision_bytes=0,
            basis="the largest among known cards of its compute capability, or of all where there are none",
        ),
    )


def _term(name: str) -> str:
    """What is compared of a name: without case, separators and the words that only name the vendor or the line."""
    return re.sub(r"[\s_-]+", "", _VENDOR_WORDS.sub("", name.casefold()))


def _as_torch_says(capability: str) -> str:
    # torch gives major and minor for both vendors: gfx942 is 9.4 (version 9, 4, stepping 2), gfx90a is 9.0.
    if not capability.startswith("gfx"):
        return capability
    return f"{int(capability[3:-2])}.{int(capability[-2], 16)}"
