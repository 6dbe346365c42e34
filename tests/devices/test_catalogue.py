from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from importlib.resources import files
from typing import Any

import pytest
from pydantic import ValidationError

from budgetdb.devices import base
from budgetdb.devices.catalogue import (
    Catalogue,
    CatalogueCard,
    UnknownCardError,
    custom_card,
    find_card,
    load_catalogue,
)
from budgetdb.devices.info import BUCKET_BYTES, DeviceInfo
from budgetdb.errors import UnknownNameError, UsageError

CARDS = load_catalogue().cards
MIB, GIB = 2**20, 2**30
# What GH200's names count is the memory of its processor.
SIZED = [
    (card, int(sizes[-1]))
    for card in CARDS
    for name in (card.name, *card.aliases)
    if not name.startswith("NVIDIA GH200") and (sizes := re.findall(r"(\d+)gb", name, re.IGNORECASE))
]


def entry(name: str, *aliases: str, **changes: Any) -> dict[str, Any]:
    figure = {"bytes": 8 * GIB, "exact": True, "precision_bytes": 0, "basis": "seen", "source": "https://example.org"}
    card = {"name": name, "aliases": list(aliases), "compute_capability": "8.9", "total": figure, "context": figure}
    return card | changes


def catalogue(*cards: dict[str, Any], ambiguous: tuple[str, ...] = ()) -> Catalogue:
    return Catalogue.model_validate_json(
        json.dumps({"schema_version": 1, "ambiguous": list(ambiguous), "cards": list(cards)})
    )


def test_it_ships_and_holds_the_cards_people_evaluate_on() -> None:
    assert files("budgetdb.shipped_profiles").joinpath("devices.json").is_file()
    assert len(CARDS) >= 50
    assert {"6.0", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "gfx908", "gfx90a", "gfx942"} <= {
        card.compute_capability for card in CARDS
    }


@pytest.mark.parametrize("card", CARDS, ids=lambda card: f"{card.name} {card.total_bytes}")
def test_every_figure_says_where_it_is_from(card: CatalogueCard) -> None:
    assert card.total.source
    assert card.context.source
    assert card.capability_source
    for figure in (card.total, card.context):
        assert re.search(r"\d", figure.basis)
        assert figure.precision_bytes <= max(figure.bytes // 40, MIB)
    assert 100 * MIB < card.context_bytes < GIB < card.total_bytes


@pytest.mark.parametrize("card", CARDS, ids=lambda card: f"{card.name} {card.total_bytes}")
def test_a_figure_is_what_its_basis_says(card: CatalogueCard) -> None:
    """Each exact figure stands in the words quoted from its source, in one unit or another."""
    if not card.total.exact:
        return
    numbers = [float(number) for number in re.findall(r"\d+\.?\d*", card.total.basis)]
    readings = [number * unit for number in numbers for unit in (1, 1024, MIB, GIB)]
    nearest = min(abs(reading - card.total_bytes) for reading in readings)
    assert nearest <= max(card.total.precision_bytes, 1)


@pytest.mark.parametrize(("card", "gigabytes"), SIZED, ids=lambda value: getattr(value, "name", str(value)))
def test_memory_is_near_the_size_in_the_name(card: CatalogueCard, gigabytes: int) -> None:
    assert 0.9 * gigabytes * 1e9 < card.total_bytes <= gigabytes * GIB


def test_sizes_in_names_are_looked_at() -> None:
    assert len({card.name for card, _ in SIZED}) >= 30


def test_only_declared_names_are_shared() -> None:
    loaded = load_catalogue()
    names = [card.name for card in CARDS]
    assert {name for name in names if names.count(name) > 1} <= set(loaded.ambiguous)
    for card in CARDS:
        for name in loaded.own_names(card):
            assert find_card(name) is card
    for name in loaded.ambiguous:
        with pytest.raises(UsageError, match="stands for"):
            find_card(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("nvidia a100-sxm4-80gb", "NVIDIA A100-SXM4-80GB"),
        ("A100-80GB-SXM", "NVIDIA A100-SXM4-80GB"),
        ("a100 80gb pcie", "NVIDIA A100 80GB PCIe"),
        ("t4", "Tesla T4"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("GeForce RTX 2080 Ti", "NVIDIA GeForce RTX 2080 Ti"),
        ("MI300X", "AMD Instinct MI300X"),
        ("H100 MIG 1g.20gb", "NVIDIA H100 80GB HBM3 MIG 1g.20gb"),
    ],
)
def test_a_card_is_found_by_what_people_type(name: str, expected: str) -> None:
    assert find_card(name).name == expected


def test_a_card_of_the_same_name_and_another_size() -> None:
    small, large = find_card("RTX 4060 Ti 8GB"), find_card("rtx 4060 ti 16gb")
    assert small.name == large.name
    assert small.total_bytes < 8 * GIB < large.total_bytes < 16 * GIB


def test_an_unknown_card_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        find_card("A1000-SXM4-80GB")
    error = caught.value
    assert str(error).startswith("unknown card 'A1000-SXM4-80GB'. Did you mean ")
    assert "'NVIDIA A100-SXM4-80GB'" in str(error)
    assert str(error).endswith("Any other card can be described: --memory 48GiB --capability 8.9")
    assert (error.kind, error.name, error.exit_code) == ("card", "A1000-SXM4-80GB", 2)
    assert "A100" not in error.known  # it would only lead to the next error
    twin = copy.copy(error)
    assert (type(twin), str(twin), twin.known) == (UnknownCardError, str(error), error.known)


@pytest.mark.parametrize("name", ["", "nvidia", "potato"])
def test_an_unknown_card_that_resembles_none(name: str) -> None:
    with pytest.raises(UnknownCardError) as caught:
        find_card(name)
    assert str(caught.value) == f"unknown card {name!r}. It can be described: --memory 48GiB --capability 8.9"


def test_an_ambiguous_name_is_answered_with_the_choices() -> None:
    with pytest.raises(UsageError) as caught:
        find_card("V100 32GB")
    assert str(caught.value) == (
        "'V100 32GB' stands for 2 cards. "
        "Name one of 'Tesla V100-SXM2-32GB' (31.7 GiB), 'Tesla V100-PCIE-32GB' (31.7 GiB)"
    )
    with pytest.raises(UsageError, match=r"Name one of 'RTX 4060 Ti 8GB' \(.*\), 'RTX 4060 Ti 16GB' \(.*\)$"):
        find_card("NVIDIA GeForce RTX 4060 Ti")


@pytest.mark.parametrize(
    ("name", "capability"),
    [("H100", "9.0"), ("MI300X", "9.4"), ("MI210", "9.0"), ("MI100", "9.0"), ("RTX 5090", "12.0")],
)
def test_a_card_describes_itself_as_torch_would(name: str, capability: str) -> None:
    card = find_card(name)
    assert card.info() == DeviceInfo(name=card.name, total_bytes=card.total_bytes, compute_capability=capability)
    assert card.info().key_bytes % BUCKET_BYTES == 0


def test_a_card_that_the_user_describes() -> None:
    card = custom_card(48 * GIB, "8.9")
    assert card.info() == DeviceInfo("custom card of 48.0 GiB, 8.9", 48 * GIB, compute_capability="8.9")
    assert card.context_bytes == max(known.context_bytes for known in CARDS if known.compute_capability == "8.9")
    assert custom_card(GIB, "99.0").context_bytes == max(known.context_bytes for known in CARDS)
    assert custom_card(GIB, "gfx1100", name="mine").info() == DeviceInfo("mine", GIB, compute_capability="11.0")


@pytest.mark.parametrize("capability", ["", "8", "8.9 ", "8.9\n", "sm_89", "gfx", "9.0a"])
def test_a_capability_that_is_none(capability: str) -> None:
    with pytest.raises(UsageError) as caught:
        custom_card(GIB, capability)
    assert str(caught.value) == (
        f"{capability!r} is no compute capability. Write it like --capability 8.9, or gfx942 for AMD"
    )


@pytest.mark.parametrize("memory_bytes", [0, -1])
def test_a_card_without_memory(memory_bytes: int) -> None:
    with pytest.raises(UsageError, match=f"^a card can't have {memory_bytes} bytes. Write it like --memory 48GiB$"):
        custom_card(memory_bytes, "8.9")


def test_a_sound_catalogue() -> None:
    found = catalogue(entry("Card 1", "one", "both"), entry("Card 2", "both"), ambiguous=("BOTH",))
    assert found.find("ONE").name == "Card 1"
    assert found.own_names(found.cards[0]) == ["Card 1", "one"]


@pytest.mark.parametrize(
    ("cards", "ambiguous", "message"),
    [
        ([entry("Card 1"), entry("card-1")], (), r"but not both: \['card1'\]"),
        ([entry("Card 1", "a"), entry("Card 2", "A")], (), r"but not both: \['a'\]"),
        ([entry("Card 1", "a")], ("a",), r"but not both: \['a'\]"),
        ([entry("Card 1"), entry("Card 1")], ("Card 1",), r"without a name of their own: \['Card 1', 'Card 1'\]"),
        ([entry("Card 1", compute_capability="sm_89")], (), "should match pattern"),
        ([entry("Card 1", capability_source="somewhere")], (), "should match pattern"),
        ([entry("Card 1", memory=1)], (), "Extra inputs"),
    ],
)
def test_a_faulty_catalogue_is_refused(cards: list[dict[str, Any]], ambiguous: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        catalogue(*cards, ambiguous=ambiguous)


@pytest.mark.parametrize(
    ("code", "torch"),
    [
        ("import budgetdb.devices.catalogue as c; c.find_card('H100').info(); c.custom_card(2**30, '8.9')", False),
        ("import budgetdb.devices.info", False),
        ("import budgetdb.devices.base", True),  # so the two above can fail
    ],
)
def test_looking_a_card_up_does_not_import_torch(code: str, torch: bool) -> None:
    script = f"{code}\nimport sys\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(torch)


def test_devices_still_find_their_info_where_it_was() -> None:
    assert base.DeviceInfo is DeviceInfo
    assert base.BUCKET_BYTES == BUCKET_BYTES
