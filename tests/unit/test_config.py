import pytest

from triptych import config
from triptych.cli import _config, _parser
from triptych.errors import InvalidConfig, InvalidPattern


def read(*argv):
    return _config(_parser().parse_args(["serve", *argv]))


def test_every_setting_is_a_flag_and_every_flag_comes_back():
    given = read(
        "--pattern=E/P/D", "--torch-kv-blocks=7", "--no-torch-prefix-cache", "--enable-multimodal"
    )
    assert given.torch.kv_blocks == 7
    assert given.torch.prefix_cache is False
    assert given.enable_multimodal is True
    assert read(*config.to_flags(given)) == given


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "triptych.toml"
    file.write_text('pattern = "E/PD"\nport = 9000\n[limits]\nchoices = 3\n')
    merged = read("--config", str(file), "--port", "9001")
    assert (merged.pattern, merged.port, merged.limits.choices) == ("E/PD", 9001, 3)


@pytest.mark.parametrize(
    "text", ["colour = 1", "[limits]\nchoises = 3", 'port = "many"', "port = 99999", "port ="]
)
def test_an_unknown_key_or_a_wrong_value_is_an_error(tmp_path, text):
    file = tmp_path / "triptych.toml"
    file.write_text(text)
    with pytest.raises(InvalidConfig):
        read("--config", str(file))


def test_an_impossible_pattern_is_refused_when_it_is_read():
    with pytest.raises(InvalidPattern):
        read("--pattern", "D/P")


def test_the_key_stays_out_of_command_lines(monkeypatch):
    monkeypatch.setenv("TRIPTYCH_API_KEY", "sesame")
    given = read()
    assert given.api_key == "sesame"
    assert not any("sesame" in word for word in config.to_flags(given))
