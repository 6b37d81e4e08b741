import contextlib

import msgspec
import pytest

from triptych.checkpoint import packaged_folder
from triptych.cli import main
from triptych.commands import demo
from triptych.commands.client import ChatAnswer
from triptych.commands.demo import examples
from triptych.commands.terminal import Terminal, display_width
from triptych.config import Config
from triptych.errors import UnsupportedModel

OMNI = str(packaged_folder("qwen_omni"))
TIMINGS = {"fetch": 0.1, "prepare": 5.0, "encode": 9.0, "transfer": 0.4, "prefill": 8.0}
TIMINGS["decode"] = 30.0


def heard(answer):
    return ChatAnswer(answer, "stub", "stop", {}, TIMINGS)


def lines(one, terminal, answer="It is red."):
    return list(demo.draw_example("1/8", one, heard(answer), terminal))


def of_kinds(*kinds):
    return next(one for one in examples() if tuple(item.kind for item in one.media) == kinds)


@pytest.mark.parametrize("one", examples(), ids=lambda one: one.question)
@pytest.mark.parametrize("width", [20, 30, 80, 200])
@pytest.mark.parametrize("colours", ["none", "some", "all"])
def test_every_example_fits_every_terminal(one, width, colours):
    shown = lines(one, Terminal(colours, True, width))
    assert max(map(display_width, shown)) <= width
    if colours == "none":
        assert "\x1b" not in "".join(shown)
    text = "".join("".join(shown).split())
    for word in (*one.question.split(), "answer", "decode", "30.0"):
        assert word in text


def test_what_cannot_be_drawn_is_described():
    for kind in ("image", "video", "audio"):
        one = of_kinds(kind)
        plain = "\n".join(lines(one, Terminal("none", False)))
        first = one.media[0].about.split()[0]
        assert f"{demo.NAMES[kind]:10}{first}" in plain
        coloured = "\n".join(lines(one, Terminal("all", True)))
        assert f"{demo.NAMES[kind]:10}{first}" not in coloured
    both = "\n".join(lines(of_kinds("image", "audio"), Terminal("none", True)))
    assert "█" in both  # a sound has a shape without colours too
    assert "picture   " in both
    assert "sound     " not in both


def test_words_stand_beside_a_picture_and_below_a_clip():
    beside = lines(of_kinds("image"), Terminal("all", True))
    [row] = [line for line in beside if "question" in line]
    assert "▀" in row
    below = lines(of_kinds("video"), Terminal("all", True))
    [row] = [line for line in below if "question" in line]
    assert "▀" not in row
    narrow = lines(of_kinds("image"), Terminal("all", True, 40))
    assert not any("▀" in line for line in narrow if "question" in line)


def test_right_and_wrong_answers_are_shown():
    one = of_kinds("video")
    text = " ".join(one.truth)
    assert any("right" in line for line in lines(one, Terminal(), f"It moves to the {text}."))
    assert any(f"wrong: it is {text}" in line for line in lines(one, Terminal(), "No idea."))


def test_an_answer_cannot_steer_the_terminal():
    assert "\x1b[2J" not in "".join(lines(of_kinds("image"), Terminal(), "a\x1b[2Jb"))


class Client:
    """A server that knows every answer, or none."""

    def __init__(self, knows):
        self._knows = knows

    def ask(self, question, media, max_tokens):
        one = next(one for one in examples() if one.question == question)
        assert len(media) == len(one.media)
        return heard(" ".join(one.truth) if self._knows else "No idea.")


@pytest.fixture
def served(monkeypatch):
    """What the demo had served, and by whom; the model is a real one, as far as the test says."""
    configs = []

    def serve(knows):
        @contextlib.contextmanager
        def fake_server(config, say):
            configs.append(config)
            yield Client(knows)

        monkeypatch.setattr(demo, "temporary_server", fake_server)
        monkeypatch.setattr(demo, "why_meaningless", lambda config: "")
        monkeypatch.setattr(demo, "resolve", named)
        return configs

    return serve


def named(config):
    return msgspec.structs.replace(config, model=config.model or OMNI)


@pytest.mark.parametrize(("knows", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_says_whether_all_answers_are_right(served, capsys, knows, code):
    configs = served(knows)
    assert demo.run(Config(engine="fake")) == code
    count = len(examples())
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"{count if knows else 0} of {count} answers are right."
    assert configs[0].enable_multimodal


def test_another_model_may_be_wrong(served, capsys):
    served(False)
    assert demo.run(Config(engine="fake", model=OMNI)) == 0
    assert " 0 of " in capsys.readouterr().out.replace("\n", " ")


def test_a_model_is_asked_about_what_it_takes(served, capsys):
    configs = served(True)
    assert demo.run(Config(engine="fake", model=str(packaged_folder("qwen")), pattern="EP/D")) == 0
    shown = capsys.readouterr().out
    assert "clip" in shown
    assert "sound" not in shown
    assert configs[0].pattern == "EP/D"


@pytest.mark.parametrize(
    ("words", "file", "pattern"),
    [
        ([], "", "E/PD"),
        (["--pattern=EPD"], "", "EPD"),
        ([], 'pattern = "EP/D"', "EP/D"),
        (["--pattern=E/P/D"], 'pattern = "EP/D"', "E/P/D"),
    ],
)
def test_the_demo_runs_e_pd_unless_a_pattern_is_given(served, tmp_path, words, file, pattern):
    (tmp_path / "t.toml").write_text(file)
    configs = served(True)
    assert main(["demo", "--engine=fake", f"--config={tmp_path / 't.toml'}", *words]) == 0
    assert configs[0].pattern == pattern


def test_its_help_shows_its_own_defaults_and_only_settings_that_apply(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "E*2/P/D*3 (default: E/PD)" in told
    assert "--port" not in told
    assert "--enable-multimodal" not in told
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "E*2/P/D*3 (default: EPD)" in told
    assert "--port" in told
    assert "--enable-multimodal" in told


@pytest.mark.parametrize("word", ["--port=8000", "--enable-multimodal"])
def test_settings_that_do_not_apply_are_refused(capsys, word):
    with pytest.raises(SystemExit) as left:
        main(["demo", "--engine=fake", word])
    assert left.value.code == 2
    assert capsys.readouterr().err == (
        f"triptych: unrecognized arguments: {word}. See `triptych demo --help`.\n"
    )


def test_answers_that_mean_nothing_are_not_judged(served, monkeypatch, capsys):
    served(False)
    monkeypatch.setattr(demo, "why_meaningless", lambda config: "noise")
    assert demo.run(Config(engine="fake")) == 0
    shown = capsys.readouterr().out
    assert "No real model answered (noise)" in shown
    assert "wrong" not in shown


def test_a_model_without_media_is_refused(monkeypatch):
    monkeypatch.setattr(demo, "examples", tuple)
    with pytest.raises(UnsupportedModel, match="text only"):
        demo.run(Config(model=OMNI, engine="fake"))
