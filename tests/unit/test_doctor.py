import pytest

from triptych import doctor
from triptych.config import Config
from triptych.model import packaged


def findings(**settings):
    return list(doctor._model(Config(**settings)))


def test_a_model_that_can_be_served_is_fine():
    [(good, line)] = findings(model=str(packaged("qwen")), engine="fake")
    assert good
    assert "model qwen" in line


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
    monkeypatch.setattr(doctor, "CHECKS", [lambda config: iter([(True, "this"), (False, "that")])])
    assert doctor.run(Config()) == 1
    assert capsys.readouterr().out == "ok    this\nMEND  that\n"


def test_a_worker_host_that_is_not_ours_is_to_mend():
    [(good, line)] = doctor._port(Config(port=0, worker_host="192.0.2.1"))
    assert not good
    assert "--worker-host" in line
