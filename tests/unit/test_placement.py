"""Where workers go, with a stand-in for the list of GPUs: no GPU is needed, and none is looked for.

Issue 14, finding 10.
"""

import contextlib
import os
import sys

import msgspec
import pytest

from triptych import placement
from triptych.commands import launch
from triptych.config import Config, load_config
from triptych.deploy.container import Containers, config_inside
from triptych.engines.adapter.arguments import gpus_per_engine
from triptych.errors import InvalidConfig
from triptych.runtime import gpus as driver
from triptych.runtime import run_dir
from triptych.runtime.gpus import NO_DRIVER, GpuInfo, GpuInventory
from triptych.stages import process
from triptych.topology import Topology

GIB = 1 << 30


def some(count, memory=80 * GIB):
    return GpuInventory(
        tuple(GpuInfo("NVIDIA H200", memory) for _ in range(count)), "" if count else NO_DRIVER
    )


def placed(pattern, gpus, device="auto", devices="", *, width=1, own_encoder=False, share=0.0):
    wanted = placement.worker_specs(Topology.parse(pattern), width=width, own_encoder=own_encoder)
    return placement.place_workers(wanted, gpus, device=device, devices=devices, share=share)


def where(*arguments, **options):
    return {place.worker.id: place.device for place in placed(*arguments, **options)}


@pytest.mark.parametrize(
    ("pattern", "count", "expected"),
    [
        ("E/P/D", 0, {"E-0": "cpu", "P-0": "cpu", "D-0": "cpu"}),
        ("E/P/D", 1, {"E-0": "cuda:0", "P-0": "cuda:0", "D-0": "cuda:0"}),
        ("E/P/D", 2, {"E-0": "cuda:0", "P-0": "cuda:0", "D-0": "cuda:1"}),
        ("E/P/D", 4, {"E-0": "cuda:2", "P-0": "cuda:0", "D-0": "cuda:1"}),
        ("EPD*3", 2, {"EPD-0": "cuda:0", "EPD-1": "cuda:1", "EPD-2": "cuda:0"}),
        (
            "E*2/P/D*3",
            4,
            {
                "E-0": "cuda:0",
                "E-1": "cuda:1",
                "P-0": "cuda:0",
                "D-0": "cuda:1",
                "D-1": "cuda:2",
                "D-2": "cuda:3",
            },
        ),
    ],
)
def test_workers_spread_over_the_gpus(pattern, count, expected):
    assert where(pattern, some(count)) == expected
    if count:
        assert where(pattern, some(count), "cuda") == expected


def test_a_smaller_gpu_gets_less():
    gpus = GpuInventory((GpuInfo("small", 24 * GIB), GpuInfo("large", 80 * GIB)))
    assert list(where("EPD*4", gpus).values()).count("cuda:0") == 1


def test_device_names_one_gpu_for_all():
    assert set(where("E/P/D", some(2), "cuda:1").values()) == {"cuda:1"}
    assert set(where("E/P/D", some(2), "cpu").values()) == {"cpu"}


@pytest.mark.parametrize(
    ("pattern", "devices", "expected"),
    [
        (
            "E/P/D*2",
            "E=cuda:0,P=cuda:1,D=cuda:2-3",
            {"E-0": "cuda:0", "P-0": "cuda:1", "D-0": "cuda:2", "D-1": "cuda:3"},
        ),
        (
            "E/PD*3",
            "E=cpu, PD = cuda:0,cuda:3",
            {"E-0": "cpu", "PD-0": "cuda:0", "PD-1": "cuda:3", "PD-2": "cuda:0"},
        ),
        (  # one that is not named avoids those that are
            "E/P/D",
            "P=cuda:0,D=cuda:1-1",
            {"E-0": "cuda:2", "P-0": "cuda:0", "D-0": "cuda:1"},
        ),
        ("EPD*2", "EPD=cuda", {"EPD-0": "cuda:0", "EPD-1": "cuda:1"}),
    ],
)
def test_devices_are_chosen_by_role(pattern, devices, expected):
    assert where(pattern, some(4), devices=devices) == expected


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        ("X=cuda:0", "there is no role X, but E, P, D"),
        ("EP=cuda:0", "there is no role EP"),
        ("P=cuda:2", r"'cuda:2' is not there: there are cuda:0 \(NVIDIA H200, 80 GiB\), cuda:1"),
        ("P=cuda:0-5", "'cuda:0-5' is not there"),
        ("P=tpu", "'tpu' is unknown"),
        ("P=cuda:1-0", "'cuda:1-0' is unknown"),
        ("P=", "'' is unknown"),
        ("cuda:0", "cannot be read at 'cuda:0'"),
        ("P=cuda:0,P=cuda:1", "each role once"),
        ("P=cpu,cuda:1", "either cpu or GPUs"),
        ("P=cuda:0-1", r"names 2 GPUs, and 1 P worker\(s\) use 1.*P\*2"),
    ],
)
def test_devices_that_cannot_be_are_refused(devices, told):
    with pytest.raises(InvalidConfig, match=told):
        placed("E/P/D", some(2), devices=devices)


def test_a_gpu_where_there_is_none_is_refused_with_the_reason():
    for device in ("cuda", "cuda:0"):
        with pytest.raises(InvalidConfig, match=f"'{device}' is not there: {NO_DRIVER}. Say cpu"):
            placed("EPD", some(0), device)


def test_gpus_that_cannot_be_listed_are_left_to_the_engine():
    assert set(where("E/PD", GpuInventory(None)).values()) == {"auto"}
    assert set(where("E/PD", GpuInventory(None), "cuda:1").values()) == {"cuda:1"}


def shares(*arguments, **options):
    return {place.worker.id: place.share for place in placed(*arguments, **options)}


def test_workers_of_one_gpu_divide_its_memory():
    found = shares("E/P/D", some(1))
    assert found["P-0"] == found["D-0"]
    assert found["P-0"] == pytest.approx(3 * found["E-0"], rel=0.01)
    assert 0.85 < sum(found.values()) <= placement.USABLE_SHARE
    # With vLLM's own encoder an E worker is a whole engine.
    assert len(set(shares("E/P/D", some(1), own_encoder=True).values())) == 1


def test_a_worker_alone_on_its_gpu_takes_what_its_engine_takes():
    assert set(shares("E/P/D", some(4)).values()) == {0.0}
    assert set(shares("E/P/D", some(0)).values()) == {0.0}
    assert shares("E/P/D", some(2))["D-0"] == 0.0


def test_a_share_that_is_given_is_everybodys():
    assert set(shares("E/P/D", some(1), share=0.3).values()) == {0.3}
    with pytest.raises(InvalidConfig, match=r"cuda:0 has 3 workers.*120%"):
        shares("E/P/D", some(1), share=0.4)


def test_an_engine_over_several_gpus_gets_them_together():
    assert where("E/P/D", some(4), width=2) == {
        "E-0": "cuda:0",
        "P-0": "cuda:0-1",
        "D-0": "cuda:2-3",
    }
    found = where("E/P/D", some(5), devices="P=cuda:0,cuda:2,D=cuda:3-4", width=2)
    assert found["P-0"] == "cuda:0,2"
    assert placement.gpu_numbers(found["P-0"]) == (0, 2)
    with pytest.raises(InvalidConfig, match="P-0 takes 8 GPUs, and there are 4"):
        placed("E/P/D", some(4), width=8)
    with pytest.raises(InvalidConfig, match="takes 2 GPUs, and 1 are named"):
        placed("E/P/D", some(4), devices="P=cuda:0", width=2)


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("", 1),
        ("--tensor-parallel-size 2", 2),
        ("-tp=4 --pipeline_parallel_size=2", 8),
        ("--tp-size 2", 2),
    ],
)
def test_the_gpus_of_one_engine_are_read_from_its_options(words, count):
    assert gpus_per_engine(Config(engine_args=words)) == count


@pytest.fixture
def one_gpu(monkeypatch):
    """This machine seems to have an H200."""
    monkeypatch.setattr(launch, "_gpus_seen", lambda _: some(1, 139 * GIB))


def flags_of(config):
    return {child.name: child.argv for child in launch.server_processes(config)}


def test_every_worker_gets_its_device_and_share(one_gpu):
    config = launch.resolve(Config(pattern="E/P/D", port=8000, devices="E=cpu"))
    told = flags_of(config)
    assert "--device=cpu" in told["E-0"]
    for name in ("P-0", "D-0"):
        assert {"--device=cuda:0", "--gpu-memory-utilization=0.45"} <= set(told[name])
    assert not any(word.startswith("--devices") for words in told.values() for word in words)


def test_the_banner_says_where_workers_are(one_gpu, monkeypatch):
    config = launch.resolve(Config(pattern="E/P/D", port=8000))
    assert (
        "  devices    cuda:0 (NVIDIA H200, 139 GiB): E-0 13%, P-0 38%, D-0 38% of its memory\n"
        in launch.banner(config)
    )
    monkeypatch.setattr(launch, "_gpus_seen", lambda _: some(0))
    assert f"  devices    cpu ({NO_DRIVER}): E-0, P-0, D-0\n" in launch.banner(config)
    said = msgspec.structs.replace(config, device="cpu")
    assert "  devices    cpu: E-0, P-0, D-0\n" in launch.banner(said)


def test_the_start_is_refused_for_a_device_that_is_not_there(one_gpu):
    config = launch.resolve(Config(devices="EPD=cuda:3"))
    with pytest.raises(InvalidConfig, match=r"'cuda:3' is not there: there are cuda:0 \(NVIDIA"):
        launch.check_config(config)


def test_the_engine_fake_needs_no_device(monkeypatch):
    monkeypatch.setattr(launch, "_gpus_seen", lambda _: pytest.fail("it looked for GPUs"))
    launch.check_config(launch.resolve(Config(engine="fake", device="cuda:0")))


def test_containers_have_gpus_of_their_own():
    with pytest.raises(InvalidConfig, match="each container has its own"):
        config_inside(load_config({"model": "/m", "devices": "EPD=cuda:0"}, {}), Containers())


@pytest.mark.parametrize(
    ("seen", "device", "left"),
    [
        (None, "cuda:1", "1"),
        ("4,GPU-8a,6", "cuda:1", "GPU-8a"),
        ("4,5,6", "cuda:0,2", "4,6"),
        ("4,5,6,7", "cuda:2-3", "6,7"),
    ],
)
def test_a_worker_sees_its_own_gpus_alone(monkeypatch, seen, device, left):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert process.restrict_gpus(Config(device=device)).device == "cuda"
    assert os.environ.pop("CUDA_VISIBLE_DEVICES") == left


def test_a_worker_refuses_a_gpu_that_it_may_not_see(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(InvalidConfig, match="cuda:2 is not there: CUDA_VISIBLE_DEVICES names 2"):
        process.restrict_gpus(Config(device="cuda:2"))
    for device in ("auto", "cpu", "cuda"):
        config = Config(device=device)
        assert process.restrict_gpus(config) is config
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_the_driver_is_asked_in_another_process(monkeypatch):
    """Here without a driver that answers: it says why, and nothing is raised."""
    monkeypatch.setattr(driver, "_has_driver", lambda: True)
    found = driver.visible_gpus(sys.executable)
    assert found.found == () or found.found is not None
    assert bool(found.found) != bool(found.why)
    assert "does not answer" in driver.visible_gpus("/not/there").why


def test_workers_of_one_gpu_load_one_after_the_other(tmp_path):
    order = []
    with run_dir.lock(tmp_path, "loading-on-0"):
        with contextlib.ExitStack() as other:
            other.enter_context(run_dir.lock(tmp_path, "loading-on-1"))  # not held up
            order.append("other")
        pid = os.fork()
        if not pid:
            with run_dir.lock(tmp_path, "loading-on-0"):
                os._exit(0 if (tmp_path / "done").exists() else 1)
        (tmp_path / "done").touch()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
