"""Finding 12: every setting from the environment; flags win over it, it wins over the file."""

import os
import subprocess
import sys

import pytest

from triptych import environment
from triptych.cli import _config, _parser
from triptych.commands import launch
from triptych.commands.temporary_server import temporary_server
from triptych.config import Config, all_settings, literal_values, load_config
from triptych.errors import InvalidConfig

# What each setting can be set to, where no value can be made from its type alone.
VALUES = {
    ("pattern",): "E/P/D",
    ("limit_media",): "image=2",
    ("join",): "nats://10.0.0.1:4222",
    ("namespace",): "team-a",
}


def another(flag):
    """A value of this setting, as text, that is not its default."""
    if flag.path in VALUES:
        return VALUES[flag.path]
    if flag.type is bool:
        return "false" if flag.default else "true"
    if options := literal_values(flag.type):
        return next(option for option in options if option != flag.default)
    if flag.type is int:
        return str(flag.default + 1)
    if flag.type is float:
        return str(flag.default + 0.5)
    return __file__  # some name a file, and it is read


def value_of(config, path):
    for name in path:
        config = getattr(config, name)
    return config


def read(environ, *argv):
    """As the command line reads it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TRIPTYCH_")]:
            patch.delenv(name)
        for name, value in environ.items():
            patch.setenv(name, value)
        return _config(_parser().parse_args(["serve", *argv]))


@pytest.mark.parametrize("flag", list(all_settings()), ids=lambda flag: flag.variable)
def test_every_setting_has_a_variable_between_file_and_flag(flag):
    text = another(flag)
    # The planes of NATS need a place to go through.
    base = {("join",): "nats://10.0.0.1:4222"} if text == "nats" else {}
    variables = environment.settings_of_environment({flag.variable: text})
    assert value_of(load_config({}, base, environment=variables), flag.path) != flag.default
    file = flag.default
    for name in reversed(flag.path):
        file = {name: file}
    config = load_config(file, base, environment=variables)
    assert str(value_of(config, flag.path)).lower() == text.lower()
    given = {**base, flag.path: flag.default}
    assert value_of(load_config({}, given, environment=variables), flag.path) == flag.default


def test_variables_have_distinct_names():
    names = [flag.variable for flag in all_settings()]
    assert len(set(names)) == len(names)
    assert not environment.NOT_SETTINGS & set(names)


def test_the_command_line_reads_them(tmp_path):
    file = tmp_path / "triptych.toml"
    file.write_text('pattern = "EP/D"\n[torch]\nkv_blocks = 1\nblock_size = 8\n')
    environ = {
        "TRIPTYCH_CONFIG": str(file),
        "TRIPTYCH_PATTERN": "E/PD",
        "TRIPTYCH_TORCH_KV_BLOCKS": "2",
        "TRIPTYCH_PORT": "",
    }
    config = read(environ)
    assert (config.pattern, config.torch.kv_blocks, config.torch.block_size) == ("E/PD", 2, 8)
    assert config.port == Config().port  # an empty variable gives nothing
    assert read(environ, "--pattern=EPD", "--torch-kv-blocks=3").torch.kv_blocks == 3


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("TRIPTYCH_PATERN", "E/PD", "TRIPTYCH_PATERN.*Did you mean TRIPTYCH_PATTERN"),
        ("TRIPTYCH_SECRT", "s", "Did you mean TRIPTYCH_SECRET"),
        ("TRIPTYCH_XYZZY", "1", "--help"),
        ("TRIPTYCH_PORT", "many", "TRIPTYCH_PORT=many: expected a whole number"),
        ("TRIPTYCH_PORT", "99999", "TRIPTYCH_PORT=99999: expected int <= 65535"),
        ("TRIPTYCH_LIMITS_FETCH_SECONDS", "x", "expected a number"),
        ("TRIPTYCH_ENABLE_MULTIMODAL", "maybe", "expected true or false"),
        ("TRIPTYCH_ROUTING", "best", "TRIPTYCH_ROUTING=best"),
    ],
)
def test_values_without_a_meaning_are_refused_by_name(name, text, said):
    with pytest.raises(InvalidConfig, match=said):
        read({name: text})


def test_variables_that_kubernetes_sets_for_a_service_are_not_settings():
    """A Service named `triptych` gives every pod TRIPTYCH_PORT=tcp://...: vLLM has that trap."""
    address = "tcp://10.96.0.1:8000"
    links = {
        "TRIPTYCH_SERVICE_HOST": "10.96.0.1",
        "TRIPTYCH_SERVICE_PORT": "8000",
        "TRIPTYCH_SERVICE_PORT_HTTP": "8000",
        "TRIPTYCH_PORT": address,
        "TRIPTYCH_PORT_8000_TCP": address,
        "TRIPTYCH_PORT_8000_TCP_ADDR": "10.96.0.1",
        "TRIPTYCH_FRONTEND_PORT": address,
        "TRIPTYCH_FRONTEND_SERVICE_HOST": "10.96.0.1",
    }
    assert environment.settings_of_environment(links) == {}


def test_processes_that_we_start_get_flags_alone(monkeypatch):
    """Else a variable would come back where a flag says the default, which is left out."""
    monkeypatch.setenv("TRIPTYCH_PATTERN", "E/PD")
    monkeypatch.setenv("TRIPTYCH_CONFIG", "/etc/triptych.toml")
    monkeypatch.setenv("TRIPTYCH_LOG", "info")
    config = launch.resolve(read({}, "--engine=fake", "--pattern=EPD"))
    for child in launch.server_processes(config):
        assert not {"TRIPTYCH_PATTERN", "TRIPTYCH_CONFIG"} & child.env.keys()
        assert child.env["TRIPTYCH_LOG"] == "info"
    seen = []

    def start(argv, env, **_):
        seen.append(env)
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(FileNotFoundError), temporary_server(config, print):
        pass
    assert "TRIPTYCH_PATTERN" not in seen[0]


def test_help_lists_them():
    done = subprocess.run(
        [sys.executable, "-m", "triptych", "serve", "--help-all"], capture_output=True, text=True
    )
    assert "TRIPTYCH_TORCH_KV_BLOCKS" in done.stdout
