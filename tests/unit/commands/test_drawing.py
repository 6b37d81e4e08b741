import re

import pytest

from triptych.commands.drawing import Thumbnail, draw_frames, draw_wave
from triptych.commands.terminal import Terminal, display_width

RED, BLUE = b"\xff\0\0", b"\0\0\xff"
COLOURED = Terminal("all", blocks=True)


def flag(width=16, height=16, upper=RED, lower=BLUE):
    """Half one colour, half another."""
    return upper * (width * height // 2) + lower * (width * height // 2)


def colours(line):
    """Upper and lower colour of every change in a line."""
    return re.findall(r"38;2;(\d+;\d+;\d+);48;2;(\d+;\d+;\d+)m", line)


def test_a_picture_is_drawn_two_pixels_to_a_character():
    lines = draw_frames(Thumbnail(16, 16, (flag(),)), COLOURED, 80, 1)
    assert len(lines) == 8
    assert {display_width(line) for line in lines} == {16}
    assert colours(lines[0]) == [("255;0;0", "255;0;0")]  # said once, as long as it stays
    assert colours(lines[-1]) == [("0;0;255", "0;0;255")]
    lines = draw_frames(Thumbnail(2, 2, (RED + RED + BLUE + RED,)), COLOURED, 80, 1)
    assert [colours(line) for line in lines] == [[("255;0;0", "0;0;255"), ("255;0;0", "255;0;0")]]


def test_it_is_made_smaller_to_fit_and_averaged():
    striped = (RED + BLUE) * 128
    lines = draw_frames(Thumbnail(16, 16, (striped,)), COLOURED, 8, 1)
    assert {display_width(line) for line in lines} == {8}
    assert len(lines) == 4
    assert set(colours("".join(lines))) == {("128;0;128", "128;0;128")}


def test_an_uneven_size_mixes_by_area():
    [line] = draw_frames(Thumbnail(3, 2, ((RED + BLUE + BLUE) * 2,)), COLOURED, 2, 1)
    assert colours(line) == [("170;0;85", "170;0;85"), ("0;0;255", "0;0;255")]


def test_a_wide_picture_stays_wide():
    lines = draw_frames(Thumbnail(32, 16, (flag(32, 16),)), COLOURED, 80, 1)
    assert (len(lines), display_width(lines[0])) == (8, 32)


def test_frames_stand_side_by_side_the_first_and_the_last_among_them():
    frames = tuple(bytes([i, i, i]) * 256 for i in range(8))
    lines = draw_frames(Thumbnail(16, 16, frames), COLOURED, 80, 4)
    assert display_width(lines[0]) == 4 * 16 + 3
    shown = [upper for upper, _ in colours(lines[0])]
    assert (shown[0], shown[-1], len(shown)) == ("0;0;0", "7;7;7", 4)


def test_fewer_frames_where_it_is_narrow():
    frames = (flag(),) * 8
    assert display_width(draw_frames(Thumbnail(16, 16, frames), COLOURED, 20, 8)[0]) <= 20


@pytest.mark.parametrize("terminal", [Terminal("none", True), Terminal("all", False)])
def test_without_colours_or_blocks_there_is_no_picture(terminal):
    assert draw_frames(Thumbnail(16, 16, (flag(),)), terminal, 80, 1) == []


def test_a_sound_is_drawn_without_colours_too():
    small = Thumbnail(wave=(0.0, 0.5, 1.0))
    assert draw_wave(small, Terminal("none", True), 80, 2) == ["  █", "▁██"]
    assert draw_wave(small, Terminal("none", True), 80, 1) == ["▁▄█"]
    assert draw_wave(small, Terminal("none", False), 80) == []
    assert "\x1b[38;2;" in draw_wave(small, COLOURED, 80)[0]


def test_a_long_sound_keeps_its_peaks_in_a_narrow_terminal():
    wave = tuple(1.0 if i == 50 else 0.0 for i in range(100))
    [line] = draw_wave(Thumbnail(wave=wave), Terminal("none", True), 10, 1)
    assert (len(line), line.count("█")) == (10, 1)
