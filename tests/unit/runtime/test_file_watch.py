"""Changes of files: noticed once, when the files have settled."""

import os

from triptych.runtime.file_watch import FileWatch


async def nothing():
    pass


def test_a_change_is_reported_once_and_only_when_the_files_have_settled(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("a")
    two.write_text("a")
    watch = FileWatch((str(one), str(two)), nothing)
    assert not watch.look()
    one.write_text("bb")
    assert not watch.look()  # the other may follow
    two.write_text("bb")
    assert not watch.look()
    assert watch.look()
    assert not watch.look()
    one.unlink()
    assert [watch.look(), watch.look(), watch.look()] == [False, True, False]


def test_a_link_that_is_swapped_is_a_change(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("same size")
    link = tmp_path / "link"
    link.symlink_to("one")
    watch = FileWatch((str(link / "file"),), nothing)
    (tmp_path / "next").symlink_to("two")
    os.replace(tmp_path / "next", link)
    assert [watch.look(), watch.look()] == [False, True]
