import base64
import io
import json
import os
import shlex
import shutil
import subprocess
import sys

import msgspec
import pytest
from PIL import Image

from triptych import cli
from triptych.api.routes import ROUTES, Access
from triptych.checkpoint import fingerprint, open_model, packaged_folder
from triptych.cli import main
from triptych.commands import launch
from triptych.config import Config, FakeSettings, all_settings
from triptych.errors import InvalidConfig, StartError, UnsupportedModel
from triptych.host import host_id, process_start
from triptych.messages import WorkerRecord
from triptych.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from triptych.runtime.directory import Directory
from triptych.runtime.gpus import NO_DRIVER, GpuInfo, GpuInventory


@pytest.fixture
def folder(tmp_path):
    """A checkpoint that the torch engine could serve, as far as can be seen without its weights."""
    path = tmp_path / "model"
    shutil.copytree(packaged_folder("qwen"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "qwen2_5_vl"}))
    (path / "model.safetensors").touch()
    return path


def command(**settings):
    """The banner's curl line, as a shell reads it."""
    config = Config(model=str(packaged_folder("qwen")), engine="fake", port=8000, **settings)
    return shlex.split(launch.banner(config).split("\n  curl ")[1])


def test_the_curl_line_survives_every_name():
    name = """it's "so" $HOME \\ `x` é"""
    words = command(served_model_name=name)
    assert json.loads(words[words.index("-d") + 1])["model"] == name
    assert words[0] == "http://127.0.0.1:8000/v1/chat/completions"
    assert not any("Authorization" in word for word in words)


def test_the_curl_line_sends_the_key_but_does_not_show_it():
    assert "Authorization: Bearer $TRIPTYCH_API_KEY" in command(api_key="sesame")
    banner = launch.banner(Config(model=str(packaged_folder("qwen")), api_key="sesame"))
    assert "sesame" not in banner
    assert '"Authorization: Bearer $TRIPTYCH_API_KEY"' in banner  # quoted so that a shell fills in


def test_the_curl_line_sends_the_first_of_several_keys():
    assert "Authorization: Bearer ${TRIPTYCH_API_KEY%%,*}" in command(api_key="sesame,street")


def test_the_curl_line_reads_the_key_from_its_file(tmp_path):
    file = tmp_path / "the keys"
    file.write_text("sesame,street\nlane\n")
    words = command(api_key="sesame,street,lane", api_key_file=str(file))
    [header] = [word for word in words if word.startswith("Authorization")]
    done = subprocess.run(["sh", "-c", f'echo "{header}"'], capture_output=True, text=True)
    assert done.stdout == "Authorization: Bearer sesame\n"


def test_the_frontend_alone_gets_the_keys_of_clients(monkeypatch):
    """And no process by its command line. Proved with ``os.environ`` as the environment of all."""
    monkeypatch.setenv("TRIPTYCH_API_KEY", "sesame")
    monkeypatch.setenv("TRIPTYCH_ADMIN_KEY", "street")
    config = Config(model="m", pattern="E/PD", api_key="sesame", admin_key="street")
    frontend, *workers = launch.server_processes(config)
    assert frontend.env["TRIPTYCH_API_KEY"] == "sesame"
    assert frontend.env["TRIPTYCH_ADMIN_KEY"] == "street"
    assert [worker.name for worker in workers] == ["E-0", "PD-0"]
    for child in workers:
        assert not {"sesame", "street"} & set(child.env.values())
        assert child.env["TRIPTYCH_SECRET"] == frontend.env["TRIPTYCH_SECRET"]
    assert not any("sesame" in w or "street" in w for c in (frontend, *workers) for w in c.argv)


def test_the_banner_says_which_media_are_accepted(folder):
    def media(**settings):
        banner = launch.banner(Config(engine="fake", **settings))
        return next(line for line in banner.splitlines() if line.startswith("  media"))

    omni = str(packaged_folder("qwen_omni"))
    config = json.loads((folder / "config.json").read_text())
    bare = {name: value for name, value in config.items() if "token_id" not in name}
    (folder / "config.json").write_text(json.dumps(bare))
    assert "text only" in media(model=str(folder), enable_multimodal=True)
    line = media(model=omni, enable_multimodal=True)
    assert line.endswith("      image, video, audio  (from data:, uploads, http(s):)")
    line = media(model=omni, enable_multimodal=True, allowed_media_domains="example.com")
    assert line.endswith("http(s): of example.com)")
    wide = {"allowed_media_path": "/srv/media", "allow_private_media": True}
    line = media(model=omni, enable_multimodal=True, **wide)
    assert line.endswith("http(s): also in private networks, file: below /srv/media)")
    assert "--enable-multimodal" in media(model=omni)


def test_an_ipv6_host_stands_in_brackets():
    assert command(host="::1")[0] == "http://[::1]:8000/v1/chat/completions"


def test_the_banner_says_when_answers_mean_nothing(folder, monkeypatch):
    assert "answers are invented" in launch.banner(Config(model=str(folder), engine="fake"))
    assert "answers" not in launch.banner(Config(model=str(folder)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent.parent))
    monkeypatch.setattr(launch, "cache_folder", lambda: folder.parent)
    assert "random weights" in launch.banner(Config(model=str(folder)))


def test_a_good_model_passes(folder):
    launch.check_config(Config(model=str(folder)))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tokenizer.json", "no tokenizer.json"),
        ("chat_template.jinja", "no chat template"),
        ("model.safetensors", "no weights"),
        ("config.json", "no config.json"),
    ],
)
def test_a_model_that_lacks_a_file_is_refused_before_anything_starts(folder, name, said):
    (folder / name).unlink()
    with pytest.raises(StartError, match=said):
        launch.check_config(Config(model=str(folder)))


def test_a_prompt_template_stands_in_for_a_chat_template(folder):
    (folder / "chat_template.jinja").unlink()
    launch.check_config(Config(model=str(folder), prompt_template="USER: <prompt>"))
    with pytest.raises(InvalidConfig, match="slot <prompt>"):
        launch.check_config(Config(model=str(folder), prompt_template="USER:"))


def test_an_unknown_family_is_refused_by_the_torch_engine_alone(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "parrot"}))
    with pytest.raises(UnsupportedModel, match=r"'parrot'.*there are .*llava, .*qwen2_5_vl"):
        launch.check_config(Config(model=str(folder)))
    launch.check_config(Config(model=str(folder), engine="fake"))


@pytest.mark.parametrize(
    "settings", [{"allowed_media_domains": "http://a"}, {"allowed_media_path": "/not/there"}]
)
def test_media_settings_that_cannot_be_meant_are_refused_before_anything_starts(folder, settings):
    with pytest.raises(InvalidConfig, match="--allowed-media-"):
        launch.check_config(Config(model=str(folder), engine="fake", **settings))


def test_a_gpu_without_a_driver_is_refused(folder, monkeypatch):
    config = Config(model=str(folder), device="cuda:0")
    monkeypatch.setattr(launch, "_gpus_seen", lambda _: GpuInventory((), NO_DRIVER))
    with pytest.raises(InvalidConfig, match="'cuda:0' is not there: no GPU driver"):
        launch.check_config(config)
    launch.check_config(msgspec.structs.replace(config, engine="fake"))
    monkeypatch.setattr(launch, "_gpus_seen", lambda _: GpuInventory((GpuInfo("a GPU", 1 << 30),)))
    launch.check_config(config)


def test_the_checkpoint_that_ships_is_served_when_none_is_named():
    config = launch.resolve(Config())
    assert config.model == str(packaged_folder("triptych-demo"))
    assert config.enable_multimodal  # it knows about nothing else
    launch.check_config(config)
    assert "model      triptych-demo  (small, trained to show" in launch.banner(config)
    assert not launch.why_meaningless(config)


def test_engine_fake_needs_no_weights_and_accepts_media_only_with_the_flag():
    """As ``--help`` says."""
    config = launch.resolve(Config(engine="fake"))
    assert config.model == str(packaged_folder("qwen"))
    assert not config.enable_multimodal
    assert launch.resolve(Config(engine="fake", enable_multimodal=True)).enable_multimodal
    told = next(flag.about for flag in all_settings() if flag.path == ("enable_multimodal",))
    assert told.endswith("always on for the demo model, unless --engine is fake")


def test_joining_a_cluster_needs_its_secret(monkeypatch):
    """No other host would know a generated one."""
    monkeypatch.delenv("TRIPTYCH_SECRET", raising=False)
    config = launch.resolve(Config(engine="fake", join="nats://127.0.0.1:4222"))
    with pytest.raises(InvalidConfig, match=r"TRIPTYCH_SECRET.*openssl rand"):
        launch.check_config(config)
    monkeypatch.setenv("TRIPTYCH_SECRET", "s" * 32)
    launch.check_config(config)


@pytest.mark.parametrize(
    ("secret", "settings", "told"),
    [
        ("abc", {"join": "nats://10.0.0.1:4222"}, 1),
        ("abc", {"worker_host": "10.0.0.2"}, 1),
        ("abc", {}, 0),
        ("s" * 16, {"join": "nats://10.0.0.1:4222"}, 0),
        ("", {"worker_host": "10.0.0.2"}, 0),  # then `serve` makes one
    ],
)
def test_a_short_secret_is_warned_about_where_other_hosts_reach_it(
    monkeypatch, capsys, tmp_path, secret, settings, told
):
    monkeypatch.setenv("TRIPTYCH_SECRET", secret)
    cli._check_single(Config(engine="fake", run_dir=str(tmp_path / "run"), **settings), "worker")
    said = capsys.readouterr().err
    assert said.count("TRIPTYCH_SECRET has 3 characters") == told
    assert not secret or secret not in said


def test_who_was_started_by_one_of_ours_leaves_warnings_to_it():
    """Else each process of a server would log the same."""
    code = """\
from triptych.config import Config
from triptych.commands.launch import warn_of_short_secret
warn_of_short_secret(Config(worker_host="10.0.0.2"))"""
    alone = [sys.executable, "-c", code]
    leash = [sys.executable, "-m", "triptych.runtime.parent_death", str(os.getpid())]
    for words, told in ((alone, True), ([*leash, *alone], False)):
        env = os.environ | {"TRIPTYCH_SECRET": "abc"}
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
        assert ("has 3 characters" in done.stderr) is told


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (Config(worker_host="10.0.0.2"), "without --worker-tls"),
        (Config(worker_host="10.0.0.2", worker_tls=True), ""),
        (Config(request_plane="nats", join="nats://10.0.0.1"), "without TLS (--join tls://..)"),
        (Config(request_plane="nats", join="tls://10.0.0.1"), ""),
        (Config(request_plane="nats", join="nats://10.0.0.1", nats_ca="ca.pem"), ""),
        (Config(request_plane="nats", join="nats://127.0.0.1", worker_host="10.0.0.2"), ""),
        (Config(), ""),
    ],
)
def test_calls_in_plain_between_hosts_are_warned_of(capsys, config, told):
    """Proved without the case of NATS."""
    launch.warn_of_plain_calls(config)
    warned = capsys.readouterr().err
    assert told in warned
    assert bool(warned) is bool(told)


@pytest.mark.parametrize("same", [True, False], ids=["same model", "another"])
def test_a_second_server_in_one_place_is_refused_before_anything_starts(tmp_path, capsys, same):
    """It would call itself ready on the other's workers, while its own are refused. Proved with
    ``check_free`` left out."""
    model = fingerprint(open_model(str(packaged_folder("qwen")))) if same else "m"
    files, pid = Directory(tmp_path).files, os.getpid()
    record = WorkerRecord("PD-1", "PD", files.claim("PD-1"), "a:1", pid, model)
    files.write(msgspec.structs.replace(record, host=host_id(), begun=process_start(pid)))
    flags = ["--engine=fake", "--pattern=E/PD*2", f"--run-dir={tmp_path}", "--port=0"]
    assert main(["serve", *flags]) == 2
    told = capsys.readouterr().err
    assert f"worker PD-1 is there already (process {pid})" in told
    assert (", of another model, runs" in told) is not same
    assert f"runs in --run-dir {tmp_path}. Give this one another --run-dir; or" in told
    assert "`triptych worker --role PD --index N`" in told


@pytest.mark.parametrize("pattern", ["E/PD", "E*2/P/D"])
def test_workers_that_only_encode_are_refused_where_media_are_off(folder, pattern):
    """Finding 11: they would start, and every picture be refused later."""
    config = Config(model=str(folder), pattern=pattern)
    with pytest.raises(InvalidConfig, match="add --enable-multimodal"):
        launch.check_config(config)
    launch.check_config(msgspec.structs.replace(config, enable_multimodal=True))


@pytest.mark.parametrize("words", [["frontend"], ["worker", "--role=E"]], ids=lambda w: w[0])
def test_so_are_they_when_started_by_hand(folder, monkeypatch, tmp_path, capsys, words):
    monkeypatch.setenv("TRIPTYCH_SECRET", "s" * 32)
    assert main([*words, str(folder), "--pattern=E/PD", f"--run-dir={tmp_path}"]) == 2
    assert "add --enable-multimodal" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["EPD", "EP/D"])
def test_text_alone_may_be_served_by_workers_that_also_encode(folder, pattern):
    launch.check_config(Config(model=str(folder), pattern=pattern))


def test_more_threads_than_cores_are_refused(folder, monkeypatch, tmp_path, capsys):
    """Finding 11: with 99999 a worker died of SIGSEGV, again and again."""
    config = Config(model=str(folder), cpu_threads=99999)
    with pytest.raises(InvalidConfig, match=r"--cpu-threads 99999: this machine has .* cores"):
        launch.check_config(config)
    launch.check_config(msgspec.structs.replace(config, cpu_threads=1))
    monkeypatch.setenv("TRIPTYCH_SECRET", "s" * 32)
    words = ["--role=EPD", "--cpu-threads=99999", "--engine=fake", f"--run-dir={tmp_path}"]
    assert main(["worker", *words]) == 2
    assert "--cpu-threads 99999" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "0.0.0.0", "api_key": "sesame"}, False),
        ({"host": "0.0.0.0", "keys_file": "keys.toml"}, False),
        ({"host": "127.0.0.1"}, False),
        ({"host": "localhost"}, False),
    ],
)
def test_a_port_that_is_open_to_other_hosts_without_a_key_is_warned_of(capsys, settings, warned):
    launch.warn_of_open_port(Config(**settings))
    assert ("Set TRIPTYCH_API_KEY" in capsys.readouterr().err) is warned


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"host": "0.0.0.0", "public_routes": "/metrics,/v1/models"}, "/metrics"),
        ({"host": "0.0.0.0", "public_routes": "/metrics, /cluster"}, "/cluster and /metrics"),
        ({"host": "0.0.0.0", "public_routes": "/v1/models"}, ""),
        ({"public_routes": "/metrics"}, ""),
    ],
)
def test_what_shows_the_machine_to_other_hosts_is_warned_of(capsys, settings, named):
    launch.warn_of_open_port(Config(api_key="sesame", **settings))
    told = capsys.readouterr().err
    assert ("(--public-routes)" in told) is bool(named)
    assert named in told


def test_the_paths_that_are_warned_of_are_those_of_the_operator():
    assert set(launch.OPERATORS_PATHS) == {r.path for r in ROUTES if r.access is Access.ADMIN}


def test_the_banner_speaks_https_and_knows_keys_of_a_file():
    words = command(tls_cert="cert.pem", keys_file="keys.toml")
    assert words[0] == "https://127.0.0.1:8000/v1/chat/completions"
    assert "-k" in words
    assert "Authorization: Bearer $KEY" in words
    assert "-k" not in command(tls_cert="cert.pem", host="192.0.2.1")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls_cert": "/not/there"}, "--tls-cert /not/there cannot be read"),
        ({"tls_key": "/not/there"}, "--tls-key needs the certificate"),
        ({"keys_file": "/not/there"}, "--keys-file /not/there cannot be read"),
        ({"public_routes": "/v1/model"}, "Did you mean /v1/models"),
        ({"cors_origins": "chat.example.com"}, "is not an origin"),
    ],
)
def test_access_that_cannot_be_meant_is_refused_before_anything_starts(
    folder, tmp_path, monkeypatch, settings, said
):
    with pytest.raises(InvalidConfig, match=said):
        launch.check_config(Config(model=str(folder), **settings))
    monkeypatch.setenv("TRIPTYCH_SECRET", "s" * 32)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    assert main(["frontend", str(folder), f"--run-dir={tmp_path}", *flags]) == 2


def test_the_curl_line_sends_a_picture_where_media_are_on():
    def content(**settings):
        words = command(**settings)
        return json.loads(words[words.index("-d") + 1])["messages"][0]["content"]

    assert content() == "Hello"
    picture, question = content(enable_multimodal=True)
    head, _, data = picture["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert image.size == (64, 64)
        assert image.convert("RGB").getpixel((32, 32)) == (220, 20, 30)
    assert question["text"] == "What colour is the circle?"
    assert max(map(len, " ".join(command(enable_multimodal=True)).splitlines())) < 600


def test_waiting_names_what_it_waits_for():
    phases = {"E-0": "loading encoder ... 40%", "PD-0": "importing vLLM ... 0%"}
    assert launch.waiting_line(12.3, phases) == (
        "  12 s: waiting for E-0 (loading encoder ... 40%), PD-0 (importing vLLM ... 0%)"
    )
    assert "the frontend to find its workers" in launch.waiting_line(1, {})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tool_parser": "hermess"}, r"--tool-parser 'hermess' is not .*Did you mean hermes\?"),
        ({"reasoning_parser": "thinks"}, r"--reasoning-parser .*, kimi, .*Did you mean think\?"),
        ({"fake": FakeSettings(replies="/not/there")}, "--fake-replies /not/there"),
        ({"engine": "torch", "fake": FakeSettings(replies="a")}, "needs --engine fake"),
    ],
)
def test_names_of_parsers_and_replies_are_checked_before_anything_starts(folder, settings, said):
    with pytest.raises(InvalidConfig, match=said):
        launch.check_config(Config(**{"model": str(folder), "engine": "fake"} | settings))
    launch.check_config(Config(model=str(folder), engine="fake", tool_parser="hermes"))


def test_help_lists_the_names_of_parsers():
    about = {flag.name: flag.about for flag in all_settings()}
    for name in ("auto", "none", *TOOL_PARSERS):
        assert name in about["--tool-parser"]
    for name in ("auto", "none", *REASONING_PARSERS):
        assert name in about["--reasoning-parser"]
