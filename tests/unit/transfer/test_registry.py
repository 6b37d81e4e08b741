"""The table of transports is the only list of them."""

from pathlib import Path
from typing import get_args

import pytest
from msgspec.structs import replace

from triptych.config import Config
from triptych.requirements import EXTRAS, is_installed
from triptych.transfer.client import TransferClient
from triptych.transfer.registry import (
    SELECTABLE,
    TRANSPORTS,
    TransferEndpoint,
    TransportName,
    common_transport,
)

ROOT = Path(__file__).parents[3]


def test_choices_of_the_setting_come_from_the_table() -> None:
    assert get_args(TransportName) == ("auto", *SELECTABLE)


@pytest.mark.parametrize("entry", TRANSPORTS.values(), ids=lambda entry: entry.name)
def test_an_entry_names_what_is_there(entry) -> None:
    assert not entry.setting or isinstance(getattr(Config(), entry.setting), str)
    assert not entry.extra or entry.extra in EXTRAS
    assert not entry.extra or entry.opened_early, "a package may be there and not load"


@pytest.mark.parametrize("name", SELECTABLE)
def test_a_client_opens_each_by_its_name(name, tmp_path) -> None:
    packages = EXTRAS.get(TRANSPORTS[name].extra, ())
    if not all(map(is_installed, packages)):
        pytest.skip("its packages are not installed")
    settings = {entry.setting: str(tmp_path) for entry in TRANSPORTS.values() if entry.setting}
    config = Config(transport=name, **settings)
    transfers = TransferClient.from_config(config, "worker-1", 1)
    assert transfers.find(name).name == name
    assert name in transfers.readable


def test_an_entry_says_whether_it_works_between_hosts() -> None:
    """``reaches`` may be any function. Off: a new one makes a transport one of a single host."""
    entry = replace(TRANSPORTS["inline"], reaches=lambda name, endpoints: True)
    assert entry.between_hosts
    hosts = [TransferEndpoint("a", "g", tuple(TRANSPORTS)), TransferEndpoint("b", "g", ())]
    for entry in TRANSPORTS.values():
        assert entry.between_hosts or not entry.reaches(entry.name, hosts)


def test_every_process_can_read_the_last_resort() -> None:
    strangers = [TransferEndpoint("a"), TransferEndpoint("b")]
    assert common_transport(strangers) == "inline"


def test_the_manual_has_a_row_for_each_in_order_of_preference() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    rows = [text.find(f"\n| `{name}` |") for name in TRANSPORTS]
    assert -1 not in rows
    assert rows == sorted(rows)
