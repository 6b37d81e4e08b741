"""Frozen samples come back as the questions that they were."""

from models.demo import frozen
from models.demo.asking import Question
from models.demo.files import File
from models.demo.recipe.sample import Turn

TURN = Turn("colour", "Which?", "Red.", ("red",), frozenset({"red", "green"}))


def test_what_was_frozen_is_read_again(tmp_path):
    files = (File("png", b"one"), File("wav", b"two"))
    asked = [
        Question("colour", 3, TURN, files, "Be short."),
        Question("word", 4, Turn("word", "Read it.", "TAP", ("TAP",)), (File("mp4", b"three"),)),
        Question("colour", 0, TURN),
    ]
    size = frozen.write(tmp_path, asked)
    assert frozen.read(tmp_path) == asked
    assert size == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 4


def test_an_earlier_file_is_replaced(tmp_path):
    frozen.write(tmp_path, [Question("old", 1, TURN, (File("png", b"old"),))])
    (tmp_path / "README.md").write_text("What these are.")
    frozen.write(tmp_path, [Question("new", 2, TURN, (File("png", b"new"),))])
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"README.md", "samples.json", "new-2-0.png"}
