import resource
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from support.nats_server import nats_server
from triptych.checkpoint import packaged_folder
from triptych.cli import main
from triptych.commands import doctor
from triptych.commands.doctor import Machine
from triptych.config import Config, Limits
from triptych.runtime.gpus import GpuInfo


def findings(**settings):
    return list(doctor._model(Config(**settings)))


def test_a_model_that_can_be_served_is_fine():
    [(good, line)] = findings(model=str(packaged_folder("qwen")), engine="fake")
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
def test_a_model_that_cannot_be_served_is_a_problem(settings, said):
    [(good, line)] = findings(model=str(packaged_folder("qwen")), **settings)
    assert not good
    assert said in line


def test_the_exit_code_tells(capsys, monkeypatch):
    found = [(True, "this"), (None, "so")]
    monkeypatch.setattr(doctor, "CHECKS", [lambda config: iter(found)])
    assert doctor.run(Config()) == 0
    found.append((False, "that"))
    assert doctor.run(Config()) == 1
    assert capsys.readouterr().out.endswith("ok      this\nwarning so\nproblem that\n")


@pytest.mark.parametrize("full", [True, False])
def test_a_full_stdout_is_reported(capsys, monkeypatch, full):
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
    [line] = [line for good, line in doctor._packages(Config()) if good is False]
    assert "(av)" in line
    assert "pip install 'triptych[torch]" in line


def test_a_picture_a_clip_and_a_sound_are_decoded_in_the_sandbox():
    found = list(doctor._decoding(Config()))
    assert found[:3] == [
        (True, f"a {what} is decoded in the sandbox") for what in ("picture", "clip", "sound")
    ]
    assert found[3][0] is not False
    assert "sandbox" in found[3][1]


def test_what_cannot_be_decoded_is_a_problem_of_its_own():
    """Finding 8's: with PyAV 19 pictures were fine, and every clip and sound refused."""
    limits = Limits(image_pixels=10, audio_seconds=0.01)
    found = list(doctor._decoding(Config(limits=limits)))
    assert [good for good, _ in found[:3]] == [False, False, False]
    for what, (_, line) in zip(("picture", "clip", "sound"), found, strict=False):
        assert f"cannot decode a {what}: " in line


def test_an_environment_of_its_own_is_asked_by_its_python(monkeypatch):
    versions = {"vllm": "0.32.0", "torch": "2.13.0+cpu", "av": "18.1.0", "triptych": "0.0.9"}
    seen = Machine(versions, {"pillow": "no libjpeg"}, None, (), {"clip": "", "sound": "no"}, ())
    asked = []

    def run(argv, **_):
        asked.append(argv)
        return subprocess.CompletedProcess(argv, 0, msgspec.json.encode(seen), b"")

    config = Config(engine="vllm")
    monkeypatch.setattr(doctor, "engine_python", lambda _: "/vllm/bin/python")
    monkeypatch.setattr(subprocess, "run", run)
    told, broken, other = doctor._environment(config)
    python = "/vllm/bin/python"
    assert told == (True, f"engine vllm: vllm 0.32.0 in {python} (torch 2.13.0+cpu, av 18.1.0)")
    assert broken == (False, f"pillow cannot be loaded in {python}: no libjpeg")
    assert other[0] is False
    assert "0.0.9" in other[1]
    assert [good for good, _ in doctor._decoding(config)] == [True, False, True]
    assert asked == [
        [python, "-m", "triptych.commands.doctor", msgspec.json.encode(Limits()).decode()]
    ]


@pytest.mark.parametrize(
    ("device", "cuda", "driver", "mark"),
    [
        ("auto", None, False, True),
        ("auto", None, True, None),
        ("cpu", None, True, True),
        ("cuda", None, False, False),
        ("cuda:1", "13.0", False, False),
    ],
)
def test_what_no_gpu_means(monkeypatch, device, cuda, driver, mark):
    monkeypatch.setattr(Path, "exists", lambda path: driver)
    machine = Machine({"torch": "2.13.0"}, {}, cuda, (), {}, ())
    [(good, line)] = doctor._no_gpu(Config(device=device), machine)
    assert good is mark
    assert "torch 2.13.0" in line


def test_gpus_are_named_with_their_memory(monkeypatch):
    gpus = (GpuInfo("H200", 139 << 30, 138 << 30), GpuInfo("H200", 139 << 30, 9 << 30))
    machine = Machine({"torch": "2.13.0"}, {}, "13.0", gpus, {}, ())
    monkeypatch.setattr(doctor, "_machine", lambda _: machine)
    _, free, full = doctor._devices(Config())
    assert free == (True, "GPU cuda:0: H200, 139 GiB, 138 free")
    assert full == (None, "GPU cuda:1: H200, 139 GiB, 9 free: another process uses it")


def test_limits_of_the_kernel_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "HUGE_PAGES", tmp_path / "enabled")
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert [good for good, _ in doctor._kernel(Config())] == [None, None]
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 65536))
    assert [good for good, _ in doctor._kernel(Config())] == [True, True]


def test_a_small_dev_shm_is_warned_of_where_the_engine_uses_it(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: (64 << 20, 0, 64 << 20))
    assert [good for good, _ in doctor._shared_memory(Config(engine="vllm"))] == [True, None]
    assert [good for good, _ in doctor._shared_memory(Config())] == [True, True]


def test_the_folder_of_transport_file_is_tried(tmp_path):
    tmp_path.chmod(0o755)
    config = Config(transport="file", transfer_folder=str(tmp_path))
    findings = [*doctor._shared_memory(config)]
    assert findings[0][0] is False
    assert "chmod 700" in findings[0][1]
    tmp_path.chmod(0o700)
    assert next(doctor._shared_memory(config)) == (True, "transport file opens")


def test_encoders_without_media_are_a_problem():
    [(good, line)] = findings(model=str(packaged_folder("triptych-demo")), pattern="E/PD")
    assert not good
    assert "--enable-multimodal" in line


def test_a_worker_host_of_another_machine_is_a_problem():
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
