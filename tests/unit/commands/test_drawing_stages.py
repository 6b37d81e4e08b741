import re

from triptych.commands.drawing import draw_bar, stage_times
from triptych.commands.terminal import Terminal, display_width

TIMINGS = {
    "fetch": 1.0, "prepare": 20.0, "encode": 30.0, "queue": 0.2, "transfer": 2.0, "import": 3.0,
    "prefill": 14.0, "decode": 30.0,
}  # fmt: skip


def test_stages_in_their_order_and_in_words_of_people():
    told = dict(reversed(TIMINGS.items()))
    assert [(stage.name, stage.ms) for stage in stage_times(told)] == [
        ("fetch", 1.0),
        ("decode media", 20.0),
        ("encode", 30.0),
        ("transfer", 5.0),
        ("prefill", 14.0),
        ("decode", 30.0),
    ]


def test_waiting_is_shown_where_it_matters():
    assert [s.name for s in stage_times({"queue": 5.0, "prefill": 95.0})] == ["queue", "prefill"]
    assert [s.name for s in stage_times({"queue": 0.5, "prefill": 95.0})] == ["prefill"]


def test_a_stage_that_did_not_happen_is_not_shown():
    assert "transfer" not in {stage.name for stage in stage_times({"encode": 1.0, "decode": 1.0})}


def test_the_bar_has_letters_without_colours_and_loses_no_cell():
    first, *figures = draw_bar(TIMINGS, Terminal(width=40), 40)
    drawn, total, unit = first.split()
    assert (total, unit) == ("100", "ms")
    assert len(drawn) == 40 - len(" 100 ms")
    assert drawn == "".join(sorted(drawn, key="fmetpd".index))
    assert abs(drawn.count("m") - drawn.count("e") * 2 / 3) <= 1
    assert "  ".join(figures) == (
        "fetch (f) 1.0  decode media (m) 20.0  encode (e) 30.0  transfer (t) 5.0  "
        "prefill (p) 14.0  decode (d) 30.0"
    )
    assert all(len(line) <= 40 for line in figures)
    assert len(figures) > 1


def test_the_bar_in_colours():
    first, *figures = draw_bar(TIMINGS, Terminal("all", True), 200)
    assert display_width(first) == 60 + len(" 100 ms")
    assert first.count("█") == 60
    assert len(figures) == 1
    assert "\x1b[38;2;" in figures[0]
    assert "(" not in figures[0]  # no letters to explain
    assert "fetch (f)" in re.sub(
        r"\x1b\[[0-9;]*m", "", draw_bar(TIMINGS, Terminal("all", False), 200)[1]
    )


def test_no_times_no_bar():
    assert draw_bar({}, Terminal(), 80) == []


def test_a_figure_that_is_too_long_for_a_line_has_two():
    _, *figures = draw_bar({"fetch": 1.0, "prepare": 20.0, "decode": 3.0}, Terminal(), 18)
    assert figures == ["fetch (f) 1.0", "decode media (m)", "20.0", "decode (d) 3.0"]


def test_all_zero_and_very_narrow():
    assert draw_bar({"fetch": 0.0}, Terminal(), 3)[0].endswith(" 0.0 ms")
    assert draw_bar(TIMINGS, Terminal(), 1)[0].endswith(" 100 ms")
