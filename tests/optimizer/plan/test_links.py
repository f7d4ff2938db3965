from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from enginewright.optimizer.plan import links as module
from enginewright.optimizer.plan.devices import find_devices
from enginewright.optimizer.plan.links import Link, default_share, find_link, split_links
from enginewright.optimizer.plan.ranks import Wires
from enginewright.runtime.shared.errors import RequestError, TargetError


def known_links() -> list[Link]:
    entries = tomllib.loads(Path(module.__file__).with_name("links.toml").read_text(encoding="utf-8"))["link"]
    return [link for entry in entries if (link := find_link(entry["name"], None)) is not None]


def test_the_table_is_whole() -> None:
    links = known_links()
    assert len({link.name for link in links}) == len(links) > 10
    for link in links:
        assert 1e8 <= link.bandwidth < 1e12 and 1e-7 < link.hop <= link.base < 1e-4
        assert link.source
        assert link.between is not link.name.startswith(("NVLink", "PCIe"))
    assert 0 < default_share() <= 1


def test_figures_that_everybody_knows() -> None:
    of = {link.name: link.bandwidth for link in known_links()}
    assert (of["NVLink 3"], of["NVLink 4"], of["NVLink 5"]) == (300e9, 450e9, 900e9)
    assert of["InfiniBand NDR"] == 2 * of["InfiniBand HDR"] == 50e9
    assert of["PCIe 5"] == 2 * of["PCIe 4"]
    assert of["Ethernet 100"] == 10 * of["Ethernet 10"] == 100 * of["Ethernet 1"]


@pytest.mark.parametrize(
    ("gpu", "given", "name"),
    [
        ("h100", "nvlink", "NVLink 4"),
        ("a100", "NVLink", "NVLink 3"),
        ("b200", "nvlink", "NVLink 5"),
        ("a100", "nvlink5", "NVLink 5"),
        ("cpu", "10GbE", None),
        ("cpu", "eth10", "Ethernet 10"),
        ("cpu", "ethernet-100gbit", "Ethernet 100"),
        ("l4", "pcie 4", "PCIe 4"),
        ("h100", "ndr", "InfiniBand NDR"),
        ("h100", "IB-HDR", "InfiniBand HDR"),
        ("h100", "infiniband hdr", "InfiniBand HDR"),
    ],
)
def test_names(gpu: str, given: str, name: str | None) -> None:
    (device,) = find_devices([gpu])
    if name is None:
        with pytest.raises(TargetError, match="isn't a known link"):
            find_link(given, device)
        return
    link = find_link(given, device)
    assert link is not None and link.name == name


@pytest.mark.parametrize(
    ("given", "bandwidth", "base"),
    [("100mbit", 12.5e6, 25e-6), ("2.5 Gbit/s", 312.5e6, 25e-6), ("20Mbit+0.3ms", 2.5e6, 325e-6)],
)
def test_links_of_a_rate(given: str, bandwidth: float, base: float) -> None:
    link = find_link(given, None)
    assert link is not None and link.between and link.reached
    assert (link.bandwidth, link.base, link.name) == (bandwidth, pytest.approx(base), given)
    assert Wires(None, link, 1, 0.5).seconds(0, bandwidth) == 1  # all of the rate, whatever others reach


@pytest.mark.parametrize(("given", "said"), [("0mbit", "has no bandwidth"), ("1gbit+soon", "'soon' isn't a time")])
def test_rates_that_cannot_be(given: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        find_link(given, None)


def test_this_machine_s_memory() -> None:
    assert find_link("memory", None) is None
    (h100,) = find_devices(["h100"])
    with pytest.raises(TargetError, match="joins ranks of this machine's processor, not H100s"):
        find_link("memory", h100)


@pytest.mark.parametrize(
    ("gpu", "given", "said"),
    [
        ("h100", "nvlnk4", "Did you mean nvlink4?"),
        ("h100", "string", "Known are NVLink 3, NVLink 4"),
        ("rtx5090", "nvlink", "Name one: NVLink 3, NVLink 4, NVLink 5"),
        ("cpu", "pcie", "Name one: PCIe 4, PCIe 5"),
        ("cpu", "", "Known are"),
    ],
)
def test_unknown_links(gpu: str, given: str, said: str) -> None:
    (device,) = find_devices([gpu])
    with pytest.raises(TargetError) as error:
        find_link(given, device)
    assert said in str(error.value)


def test_two_links_at_most() -> None:
    assert split_links(["nvlink,ndr"]) == split_links(["nvlink", "ndr"]) == ("nvlink", "ndr")
    with pytest.raises(RequestError, match="3 links are named"):
        split_links(["nvlink,ndr", "hdr"])


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_collective_waits_longer_for_more_ranks(ranks: int) -> None:
    link = next(link for link in known_links() if link.name == "NVLink 4")
    assert link.waited(ranks) == pytest.approx(6.6e-6 + (ranks - 1) * 0.6e-6)
