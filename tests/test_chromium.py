"""The browser of the tests that npm's package index has."""

from __future__ import annotations

from pathlib import Path

import chromium
import pytest

NPM = {
    "another hash": 'echo other > a.tgz; echo "[{\\"filename\\": \\"a.tgz\\"}]"',
    "no network": 'echo "npm error network" >&2; exit 1',
}


@pytest.mark.parametrize(("npm", "said"), [("another hash", "has the SHA-512"), ("no network", "npm error network")])
def test_only_the_package_of_the_known_hash_is_unpacked(
    npm: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in (("npm", NPM[npm]), ("node", "exit 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(chromium, "FOLDER", tmp_path / "chromium")
    monkeypatch.setattr(chromium.platform, "machine", lambda: "x86_64")
    if npm == "no network":
        assert said in chromium.get() and "browser tests are skipped" in chromium.get()
    else:
        with pytest.raises(ValueError, match=said):
            chromium.get()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node", "npm"]
