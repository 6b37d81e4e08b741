"""Gathered files are recorded, and files held out for tests are of other families."""

import json
import re
import zipfile
from itertools import product

from models.demo import gather_pictures


def test_sources_keep_what_others_wrote(tmp_path, monkeypatch):
    monkeypatch.setattr(gather_pictures, "DATA", tmp_path)
    listed = tmp_path / "SOURCES.json"
    listed.write_text(json.dumps({"speech.npz": ["spoken"]}))
    gather_pictures.record()
    sources = json.loads(listed.read_text())
    assert sources["speech.npz"] == ["spoken"]
    assert set(sources) == {"speech.npz", "mnist.npz", "emoji.npz", "fonts.zip"}
    assert all(
        source["package"] and source["version"] and source["licence"]
        for file in ("mnist.npz", "emoji.npz", "fonts.zip")
        for source in sources[file]
    )


def families(kept):
    return {family(face) for p in gather_pictures.FONTS if p.kept is kept for face in p.files}


def family(face):
    """The name that faces of all weights, slopes, sizes and makers of a family have in common."""
    name = re.split(r"[-_.\d]", face.replace(" ", ""))[0]
    return re.sub(
        r"(?<=[a-z])(?:ADF(?:Std)?|GWF|Bold|Italic|Regular|Condensed)+$", "", name
    ).lower()


def test_a_font_family_is_read_from_the_name_of_a_face():
    faces = ("EBGaramond08-Italic.otf", "Courier Prime Bold.otf", "GilliusADF-Bold.otf")
    assert [family(face) for face in faces] == ["ebgaramond", "courierprime", "gillius"]
    assert family("RobotoCondensed-Regular.ttf") == family("Roboto-Regular.ttf")
    assert family("allerta_medium.otf") == "allerta"


def test_whole_font_families_are_held_out():
    """Whichever package a face comes in. Where one name begins as the other they are relatives."""
    learned, kept = families(False), families(True)
    assert len(learned) >= 25
    assert len(kept) >= 8
    for one, other in product(learned, kept):
        assert not one.startswith(other)
        assert not other.startswith(one)


def test_faces_are_packed_for_training_or_for_tests(tmp_path, monkeypatch):
    def unpacked(place, package):
        faces = [place / face for face in package.files]
        for face in faces:
            face.write_text(face.name)
        return faces

    monkeypatch.setattr(gather_pictures, "DATA", tmp_path)
    monkeypatch.setattr(gather_pictures, "_unpacked", unpacked)
    gather_pictures.gather_fonts(tmp_path)
    with zipfile.ZipFile(tmp_path / "fonts.zip") as archive:
        packed = [path.split("/") for path in archive.namelist()]
    for folder, kept in (("learned", False), ("kept", True)):
        faces = [face for p in gather_pictures.FONTS if p.kept is kept for face in p.files]
        named = [face.replace(" ", "") for face in faces]
        assert [face for where, face in packed if where == folder] == named
    assert len({face for _, face in packed}) == len(packed)
