"""Finding 9: missing packages are named before anything starts, in one message."""

import pytest

from triptych import cli, requirements
from triptych.commands import launch
from triptych.config import Config, FakeSettings
from triptych.errors import InvalidConfig


@pytest.fixture
def bare(monkeypatch):
    """The wheel without extras."""
    extras = {name for packages in requirements.EXTRAS.values() for name in packages}
    monkeypatch.setattr(requirements, "is_installed", lambda name: name not in extras)


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--port=0"],
        ["demo"],
        ["ask", "what?", "--port=1"],
        ["worker", "--role=EPD", "--run-dir={tmp}"],
    ],
    ids=lambda words: words[0],
)
def test_every_command_refuses_in_one_line(bare, capsys, monkeypatch, tmp_path, words):
    monkeypatch.setenv("TRIPTYCH_SECRET", "s" * 32)
    monkeypatch.setattr(launch, "server_processes", lambda _: pytest.fail("something was started"))
    assert cli.main([word.format(tmp=tmp_path) for word in words]) == 2
    [told] = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("triptych: ")
    ]
    assert "--engine torch needs packages that are missing" in told
    for name in requirements.EXTRAS["torch"]:
        assert name in told
    assert "pip install 'triptych[torch]==" in told


def test_a_frontend_needs_no_extra(bare):
    requirements.check_packages(Config(), "frontend")
    requirements.check_packages(Config(engine="fake"), "serve")
    requirements.check_packages(Config(engine="vllm"), "serve")  # in an environment of its own


@pytest.mark.parametrize(
    ("settings", "part", "setting", "extra"),
    [
        ({"decode_at": "frontend"}, "frontend", "--decode-at frontend", "torch"),
        ({"fake": FakeSettings(decode=True)}, "worker", "--fake-decode", "torch"),
        ({"join": "nats://a"}, "frontend", "--join", "cluster"),
        ({"event_plane": "zmq"}, "worker", "--event-plane zmq", "cluster"),
        ({"transport": "nixl"}, "worker", "--transport nixl", "nixl"),
        ({"launch": "ray"}, "serve", "--launch ray", "ray"),
    ],
)
def test_each_setting_names_its_extra(bare, settings, part, setting, extra):
    with pytest.raises(InvalidConfig, match=rf"{setting} needs .*triptych\[{extra}\]"):
        requirements.check_packages(Config(engine="fake", **settings), part)


def test_all_missing_packages_are_named_at_once(bare):
    with pytest.raises(InvalidConfig, match=r"torch and --join need .*triptych\[torch,cluster\]"):
        requirements.check_packages(Config(join="nats://a"), "serve")


def test_a_package_is_found_by_its_modules_name():
    assert requirements.is_installed("pillow")
    assert not requirements.is_installed("no-such-package")
