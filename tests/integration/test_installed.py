"""What the tests run with is what constraints.txt says, all of it, from the index alone."""

from __future__ import annotations

from importlib import metadata

from pins import installed, pinned

ONLY_PRERELEASES = {
    "cwevals",
    "opentelemetry-exporter-http-transport",
    "opentelemetry-exporter-otlp-common",
    "opentelemetry-semantic-conventions",
}
"""Packages of which there is nothing else; wandb and vLLM need them."""


def test_every_package_is_there_in_the_version_that_is_pinned_and_no_other_is_pinned() -> None:
    versions, wrong = installed()
    assert not wrong
    assert versions == pinned()


def test_no_version_is_a_prerelease() -> None:
    assert {name for name, version in pinned().items() if version.is_prerelease} <= ONLY_PRERELEASES


def test_nothing_comes_from_an_address_or_a_repository() -> None:
    assert [name for name in pinned() if metadata.distribution(name).read_text("direct_url.json")] == []
