"""The Compose file is what the published schema allows, and starts what the settings say."""

import copy
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from triptych import cli, deploy
from triptych.cli import main
from triptych.config import Config
from triptych.deploy.container import Containers

ROOT = Path(__file__).parents[3]
SCHEMA = get_builtin_schema("vendor.compose-spec")
JOIN = "nats://nats.infra:4222"
PATTERNS = ["EPD", "E/PD", "E/P/D", "EP/D", "E*2/P/D*3"]


def rendered(containers=None, **settings):
    containers = Containers(**(containers or {}))
    return yaml.safe_load(deploy.render_text("compose", Config(**settings), containers))


def parsed(service):
    return cli._parser().parse_args([word.replace("$$", "$") for word in service["command"]])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_published_schema_allows_it(pattern):
    given = {"volume": "/srv/m", "gpus": 2}
    jsonschema.validate(rendered(pattern=pattern), SCHEMA)
    jsonschema.validate(rendered(given, pattern=pattern, model="/m", device="cuda"), SCHEMA)
    jsonschema.validate(rendered(pattern=pattern, join=JOIN), SCHEMA)


@pytest.mark.parametrize(
    ("name", "value"),
    [("comand", []), ("read_only", {}), ("healthcheck", {"tset": []}), ("tmpfs", {"a": 1})],
)
def test_the_schema_would_refuse_a_wrong_field(name, value):
    document = copy.deepcopy(rendered())
    document["services"]["frontend"][name] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)


@pytest.mark.parametrize("target", ["compose", "kubernetes"])
def test_the_copy_in_deploy_is_what_is_printed(target, capsys):
    """To change it: ``triptych render TARGET --config deploy/e-pd.toml > deploy/TARGET.yaml``."""
    assert main(["render", target, "--config", str(ROOT / "deploy/e-pd.toml")]) == 0
    assert capsys.readouterr().out == (ROOT / f"deploy/{target}.yaml").read_text()


def test_every_pattern_has_a_settings_file():
    files = ROOT.glob("deploy/*.toml")
    patterns = {tomllib.loads(file.read_text())["pattern"] for file in files}
    assert patterns == {"EPD", "E/PD", "E/P/D", "EP/D"}


def test_each_worker_is_a_service_with_a_name_and_an_id_of_its_own():
    services = rendered(pattern="E*2/PD")["services"]
    assert list(services) == ["nats", "frontend", "e-0", "e-1", "pd-0"]
    for name in ("e-0", "e-1", "pd-0"):
        args = parsed(services[name])
        assert f"{args.role}-{args.index}".lower() == name == services[name]["hostname"]
        assert (args.worker_host, args.join) == (name, "nats://nats:4222")
        assert services[name]["healthcheck"]["test"][-1] == args.ready_file
    assert parsed(services["frontend"]).host == "0.0.0.0"
    assert "'http://127.0.0.1:8000/health'" in services["frontend"]["healthcheck"]["test"][-1]


def test_the_health_check_of_a_server_with_tls_speaks_https():
    services = rendered(tls_cert="/tls/tls.crt", tls_key="/tls/tls.key")["services"]
    program = services["frontend"]["healthcheck"]["test"][-1]
    assert "'https://127.0.0.1:8000/health'" in program
    compile(program, "healthcheck", "exec")


def test_only_the_frontend_is_published_and_on_the_address_that_was_named():
    services = rendered(pattern="E/PD", port=9000)["services"]
    assert services["frontend"]["ports"] == ["127.0.0.1:9000:9000"]
    assert [name for name, one in services.items() if "ports" in one] == ["frontend"]
    services = rendered(host="::1")["services"]
    assert services["frontend"]["ports"] == ["[::1]:8000:8000"]


def test_secrets_come_from_the_environment():
    keys = {"TRIPTYCH_API_KEY", "TRIPTYCH_ADMIN_KEY"}
    for given, wanted in (("sesame", keys), ("", set())):
        config = Config(api_key=given, admin_key=given, admin_key_file=given and "/street")
        text = deploy.render_text("compose", config, Containers())
        assert not re.search("sesame|street", text)
        wanted = wanted | {"TRIPTYCH_SECRET", "TRIPTYCH_NATS_PASSWORD"}
        assert set(re.findall(r"\$\{(\w+):\?", text)) == wanted  # may not be forgotten
        assert set(re.findall(r"\$\{(\w+):", text)) == wanted | keys


def test_the_frontend_alone_gets_the_keys_of_clients():
    services = rendered(pattern="E/PD")["services"]
    keyed = {name for name, one in services.items() if re.search("_KEY", str(one))}
    assert keyed == {"frontend"}


def test_no_secret_is_a_word_of_a_command_line():
    """Fails with ``--pass`` of nats-server: a list of processes would show it."""
    for join in ("", JOIN):
        for service in rendered(join=join)["services"].values():
            words = service.get("command", []) + service.get("entrypoint", [])
            assert not any("PASSWORD" in word or "${" in word for word in words), words


@pytest.mark.parametrize("join", ["", JOIN])
def test_the_commands_of_its_first_lines_can_be_pasted(paste, join):
    """Fails with a remark behind one: the shell refuses it."""
    text = deploy.render_text(
        "compose", Config(join=join, api_key="x", admin_key="y"), Containers()
    )
    folder = paste(text)
    given = dict(line.split("=") for line in (folder / ".env").read_text().splitlines())
    assert set(given) == set(re.findall(r"\$\{(\w+):\?", text))
    assert set(given.values()) == {"0a1b"}
    assert (folder / ".env").stat().st_mode & 0o077 == 0
    assert (folder / "told").read_text().split() == ["docker", "compose", "up"]


def test_another_nats_may_be_joined():
    """Fails with a NATS of its own, or with the password of one."""
    document = rendered(pattern="E/PD", join=JOIN)
    assert list(document["services"]) == ["frontend", "e-0", "pd-0"]
    assert "volumes" not in document
    for service in document["services"].values():
        assert parsed(service).join == JOIN
        assert "depends_on" not in service
        login = {k: v for k, v in service["environment"].items() if "NATS" in k}
        assert login == {
            f"TRIPTYCH_NATS_{part}": f"${{TRIPTYCH_NATS_{part}:-}}"
            for part in ("USER", "PASSWORD", "TOKEN")
        }


@pytest.mark.parametrize("target", ["compose", "kubernetes"])
def test_paths_that_nothing_mounts_are_named_in_the_first_lines(target, paste):
    """And only these. No comment is a command, nor ends at a line's end of a path."""
    paths = {"allowed_media_path": "/srv/me\ndia", "nats_ca": "/etc/ca.pem", "model": "/models/m"}
    for volume in ("", "m"):
        text = deploy.render_text(target, Config(join=JOIN, **paths), Containers(volume=volume))
        told = re.findall(r"^# - (.*)$", text.split("\n# Once")[0], re.M)
        model = [] if volume else ["'/models/m' (MODEL), in frontend and workers"]
        assert told == [
            *model,
            r"'/srv/me\ndia' (--allowed-media-path), in the frontend",
            "'/etc/ca.pem' (--nats-ca), in frontend and workers",
        ]
        list(yaml.safe_load_all(text))
    paste(text)
    given = Containers(volume="m")
    for config in (Config(), Config(model="/models/m")):
        text = deploy.render_text(target, config, given if config.model else Containers())
        assert text.startswith("# Once")


@pytest.mark.parametrize(
    "words",
    [
        ["compose", "/models/x", "--port=9"],
        ["compose", "--port=9", "/models/x"],
        ["--port=9", "compose", "/models/x"],
        ["--port", "9", "compose", "--volume", "m", "/models/x"],
    ],
)
def test_the_model_may_stand_anywhere(words, capsys):
    """Fails with argparse's own way: it takes both words in a row."""
    assert main(["render", *words]) == 0
    service = yaml.safe_load(capsys.readouterr().out)["services"]["frontend"]
    assert {"--model=/models/x", "--port=9"} <= set(service["command"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compose", "--port=9", "/a", "/b"], "unrecognized arguments: /b. See"),
        (["compose", "--prot=9", "/a"], "unrecognized arguments: --prot=9"),
        (["--port=9"], "target"),
        (["podman"], "invalid choice: 'podman'"),
    ],
)
def test_words_that_are_too_many_or_wrong_are_refused(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["render", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("plane", ["--request-plane=nats", "--event-plane=nats"])
def test_what_goes_through_nats_goes_through_its_own(plane, capsys):
    """Where ``serve`` must be given one. Fails without ``own_nats``."""
    assert main(["render", "compose", plane]) == 0
    service = yaml.safe_load(capsys.readouterr().out)["services"]["frontend"]
    assert plane in service["command"]
    cli._config(parsed(service))  # which the container takes
    assert main(["doctor", plane]) == 2


def test_no_service_starts_before_nats_answers():
    services = rendered(pattern="E/PD")["services"]
    assert services["nats"]["healthcheck"]["test"][0] == "CMD"
    del services["nats"]
    waits = {"nats": {"condition": "service_healthy"}}
    assert all(service["depends_on"] == waits for service in services.values())


def test_a_dollar_in_a_setting_is_one_in_the_container():
    template = "${TRIPTYCH_SECRET} <prompt>"
    service = rendered(prompt_template=template)["services"]["frontend"]
    assert f"--prompt-template=${template}" in service["command"]  # two: Compose fills nothing in
    assert cli._config(parsed(service)).prompt_template == template


def test_gpus_are_reserved_for_workers():
    services = rendered(pattern="E/PD", device="cuda")["services"]
    for name in ("e-0", "pd-0"):
        [device] = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["count"], device["capabilities"]) == (1, ["gpu"])
    assert "deploy" not in services["frontend"]


@pytest.mark.parametrize(
    "flag",
    [
        "--cpus=0",
        "--memory=0",
        "--name=Tri_ptych",
        "--image=",
        "--gpus=-2",
        "--kubernetes-namespace=a b",
    ],
)
def test_a_wrong_size_or_name_is_named(flag, capsys):
    assert main(["render", "compose", flag]) == 2
    assert capsys.readouterr().err.startswith(f"triptych: {flag.split('=')[0]}: ")


def test_the_image_has_the_user_that_is_rendered():
    file = (ROOT / "deploy/Containerfile").read_text()
    assert f"USER {deploy.container.USER}:" in file


@pytest.mark.parametrize("file", ["deploy/Containerfile", "docs/deploy.md"])
def test_the_image_that_is_built_is_the_one_that_is_named(file):
    [named] = re.findall(r"docker build .* -t (\S+) \.$", (ROOT / file).read_text(), re.M)
    assert named == Containers().image


def test_the_image_installs_extras_that_there_are():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    [named] = re.findall("^ARG EXTRAS=(.*)$", (ROOT / "deploy/Containerfile").read_text(), re.M)
    assert set(named.split(",")) <= set(extras)
