"""What is gathered is recorded, beside what others gathered."""

import json

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


def test_whole_families_are_kept():
    kept = {package.name for package in gather_pictures.FONTS if package.kept}
    learned = {package.name for package in gather_pictures.FONTS if not package.kept}
    assert not kept & learned
    assert len(kept) >= 8
