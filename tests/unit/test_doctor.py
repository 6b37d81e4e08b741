import sys

import pytest

from support.nats_server import nats_server
from triptych import doctor
from triptych.cli import main
from triptych.config import Config, Limits
from triptych.model import packaged


def findings(**settings):
    return list(doctor._model(Config(**settings)))


def test_a_model_that_can_be_served_is_fine():
    [(good, line)] = findings(model=str(packaged("qwen")), engine="fake")
    assert good
    assert "model qwen" in line


def test_the_checkpoint_that_ships_is_looked_at_too():
    [(good, line)] = findings()
    assert good
    assert "model triptych-demo: qwen2_5_omni" in line
    [(good, line)] = findings(engine="fake")
    assert good
    assert "needs none" in line


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": "torch"}, "model_type"),
        ({"engine": "fake", "prompt_template": "no slot"}, "<prompt>"),
        ({"engine": "fake", "max_model_len": 10**9}, "max_model_len"),
    ],
)
def test_a_model_that_cannot_is_to_mend(settings, said):
    [(good, line)] = findings(model=str(packaged("qwen")), **settings)
    assert not good
    assert said in line


def test_the_exit_code_tells(capsys, monkeypatch):
    found = [(True, "this"), (None, "so")]
    monkeypatch.setattr(doctor, "CHECKS", [lambda config: iter(found)])
    assert doctor.run(Config()) == 0
    found.append((False, "that"))
    assert doctor.run(Config()) == 1
    assert capsys.readouterr().out.endswith("ok    this\nnote  so\nMEND  that\n")


@pytest.mark.parametrize("full", [True, False])
def test_a_stdout_that_takes_nothing_is_told(capsys, monkeypatch, full):
    monkeypatch.setattr(doctor, "CHECKS", [lambda config: iter([(True, "this")])])
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream if full else None)
        assert main(["doctor"]) == 1
    why = "No space left on device" if full else "it is closed"
    assert capsys.readouterr().err == (
        f"triptych: stdout cannot be written to: {why} (output_failed)\n"
    )


def test_packages_are_loaded(monkeypatch):
    lines = dict.fromkeys(line.split()[0] for good, line in doctor._packages(Config()) if good)
    assert {"av", "pillow", "numpy", "safetensors", "torch", "aiohttp"} <= lines.keys()
    monkeypatch.setitem(sys.modules, "av", None)
    [(good, line)] = [found for found in doctor._packages(Config()) if found[1].startswith("av")]
    assert not good
    assert "pip install" in line


def test_a_picture_is_decoded_in_the_cage():
    [(good, line)] = doctor._decoding(Config())
    assert good is not False
    assert "decoded" in line


def test_limits_that_no_picture_can_be_decoded_with_are_to_mend():
    [(good, line)] = doctor._decoding(Config(limits=Limits(image_pixels=10)))
    assert not good
    assert "no picture can be decoded here" in line


def test_a_worker_host_that_is_not_ours_is_to_mend():
    [(good, line)] = doctor._port(Config(port=0, worker_host="192.0.2.1"))
    assert not good
    assert "--worker-host" in line


def test_whether_others_can_be_joined(monkeypatch):
    monkeypatch.delenv("TRIPTYCH_SECRET", raising=False)
    with nats_server() as server:
        config = Config(engine="fake", join=server.url)
        [(good, line)] = doctor._joining(config)
        assert not good
        assert "TRIPTYCH_SECRET" in line
        monkeypatch.setenv("TRIPTYCH_SECRET", "s" * 32)
        assert [*doctor._joining(config)] == [
            (True, f"NATS at {server.url}: namespace default has 0 workers")
        ]
    monkeypatch.setattr("triptych.runtime.nats.START_SECONDS", 0.5)
    [(good, line)] = doctor._joining(config)
    assert not good
    assert "cannot be reached" in line
    assert [*doctor._joining(Config(engine="fake"))] == []
