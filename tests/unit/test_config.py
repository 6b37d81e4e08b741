import argparse
import contextlib
import re
import sys

import pytest

from triptych import cli, config
from triptych.cli import COMMANDS, _config, _parser, main
from triptych.commands import doctor
from triptych.errors import InvalidConfig, InvalidPattern
from triptych.usage import SHORT, VLLM_FLAGS


def read(*argv):
    return _config(_parser().parse_args(["serve", *argv]))


def test_every_setting_is_a_flag_and_every_flag_comes_back():
    given = read(
        "--pattern=E/P/D", "--torch-kv-blocks=7", "--no-torch-prefix-cache", "--enable-multimodal",
        "--routing=kv", "--kv-overlap-weight=0.5", "--no-kv-events",
    )  # fmt: skip
    assert (given.kv.overlap_weight, given.kv.temperature, given.kv.events) == (0.5, 0.0, False)
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


def refusal(tmp_path, text, *argv):
    file = tmp_path / "triptych.toml"
    file.write_text(text)
    with pytest.raises(InvalidConfig) as refused:
        read("--config", str(file), *argv)
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "there is no setting prot. Did you mean port?"),
        ("[limits]\nchoises = 3", "no setting [limits] choises. Did you mean [limits] choices?"),
        ("[torch]\nblock_size = 0", "[torch] block_size: expected int >= 1"),
        ("torch = 5", "torch: expected object"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_as_it_stands_there(tmp_path, text, said):
    told = refusal(tmp_path, text, "--cpu-threads=1")
    assert "triptych.toml: " in told
    assert said in told


@pytest.mark.parametrize("flag", ["--port=99999", "--torch-block-size=0", "--host=", "--routing="])
def test_a_wrong_flag_is_named_as_a_flag(capsys, flag):
    with pytest.raises((InvalidConfig, SystemExit)) as refused:
        read(flag)
    told = f"{refused.value}\n{capsys.readouterr().err}"
    assert flag.split("=")[0] in told
    assert "$" not in told


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ("", {}),
        (" ", {}),
        ("image=8", {"image": 8}),
        (" image = 8 , video=1,audio=0", {"image": 8, "video": 1, "audio": 0}),
    ],
)
def test_limits_of_media(given, limits):
    assert read(f"--limit-media={given}").media_limits == limits


@pytest.mark.parametrize(
    "given",
    [
        *("image", "image=", "image=-1", "image=1.5", "image=x", "film=1", "image=1,image=2", ","),
        *("image=1,", "=1", "Image=1", "image=1=2", "image=99999999999", "image=\u0663"),
    ],
)
def test_invalid_limits_of_media(given):
    with pytest.raises(InvalidConfig, match="image=8,video=1,audio=2"):
        read(f"--limit-media={given}")


def test_servers_to_join():
    assert read().servers == ()
    several = read("--join=nats://10.0.0.1:4222, tls://[::1]:4223,nats://nats")
    assert several.servers == ("nats://10.0.0.1:4222", "tls://[::1]:4223", "nats://nats")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *((given, "nats://10.0.0.1:4222") for given in ("10.0.0.1:4222", "http://a", "nats://")),
        *((given, "nats://10.0.0.1:4222") for given in ("nats://a,", "nats://a/b", "nats://a:x")),
        ("nats://user:hush@a", "TRIPTYCH_NATS_USER"),
        ("nats://hush@a", "TRIPTYCH_NATS_TOKEN"),
    ],
)
def test_a_bad_server_url_is_refused_without_its_password(given, said):
    with pytest.raises(InvalidConfig, match=said) as refused:
        read(f"--join={given}")
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", "a>", "x" * 65, "ä"])
def test_a_namespace_has_letters_and_digits(name):
    with pytest.raises(InvalidConfig, match="--namespace"):
        read(f"--namespace={name}")
    assert read("--namespace=team-a_2").namespace == "team-a_2"


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
def test_several_keys(monkeypatch, tmp_path, name):
    """From the environment, from a file of keys or from the settings file."""

    def keys(*words):
        return getattr(read(*words), f"{name}s")

    variable, flag = f"TRIPTYCH_{name.upper()}", f"--{name.replace('_', '-')}-file"
    assert keys() == ()
    for given in ("one", "one, two,"):
        monkeypatch.setenv(variable, given)
        assert keys() == tuple(given.strip(",").split(", "))
    monkeypatch.setenv(variable, ",")
    with pytest.raises(InvalidConfig, match="no key"):
        keys()
    monkeypatch.delenv(variable)
    file, toml = tmp_path / "keys", tmp_path / "triptych.toml"
    file.write_text("one\r\n\ntwo, three\n")
    assert keys(flag, str(file)) == ("one", "two", "three")
    toml.write_text(f'{name}_file = "{file}"')
    assert keys("--config", str(toml)) == ("one", "two", "three")
    toml.write_text(f'{name} = "four"')
    assert keys("--config", str(toml)) == ("four",)
    toml.write_text(f'{name} = "four"\n{name}_file = "{file}"')
    with pytest.raises(InvalidConfig, match="use one"):
        keys("--config", str(toml))
    file.write_text("\n")
    with pytest.raises(InvalidConfig, match="no key"):
        keys(flag, str(file))
    with pytest.raises(InvalidConfig, match=f"{flag} /not/there cannot be read"):
        keys(flag, "/not/there")


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
def test_a_key_replaces_the_key_and_the_key_file_of_lower_layers(monkeypatch, tmp_path, name):
    """Proved with all layers merged name by name: the first two are refused."""
    file, toml = tmp_path / "keys", tmp_path / "triptych.toml"
    file.write_text("flag")
    toml.write_text(f'{name}_file = "/not/there"')
    monkeypatch.setenv(f"TRIPTYCH_{name.upper()}", "environment")
    flag = f"--{name.replace('_', '-')}-file"
    assert getattr(read("--config", str(toml)), name) == "environment"
    assert getattr(read("--config", str(toml), flag, str(file)), name) == "flag"
    assert getattr(read(f"{flag}="), name) == "environment"  # an empty one is none
    monkeypatch.setenv(f"TRIPTYCH_{name.upper()}_FILE", str(file))
    with pytest.raises(InvalidConfig, match="use one"):
        read()


@pytest.mark.parametrize("words", [["worker", "--role=E"], ["doctor"]], ids=lambda words: words[0])
def test_processes_without_keys_read_no_key_file(monkeypatch, words):
    """Proved with ``keys`` left out of the two."""
    seen = []
    monkeypatch.setenv("TRIPTYCH_API_KEY_FILE", "/not/there")
    monkeypatch.setattr(
        cli, "_check_single", lambda config, part: seen.append(config) or sys.exit(0)
    )
    monkeypatch.setattr(doctor, "run", lambda config: seen.append(config) or 0)
    with contextlib.suppress(SystemExit):
        assert main([*words, "--admin-key-file=/not/there"]) == 0
    assert [config.api_key for config in seen] == [""]


@pytest.mark.parametrize("command", ["serve", "frontend", "worker", "ask"])
@pytest.mark.parametrize("flag", ["--api-key", "--admin-key"])
def test_a_key_is_refused_on_the_command_line(capsys, command, flag):
    """A list of processes would show it. Proved with the flags as all others are."""
    words = {"worker": ["--role=E"], "ask": ["What?"]}.get(command, [])
    with pytest.raises(SystemExit) as left:
        main([command, *words, f"{flag}=sesame"])
    told = capsys.readouterr().err
    variable = flag[2:].replace("-", "_").upper()
    assert left.value.code == 2
    assert f"set TRIPTYCH_{variable}, or give {flag}-file FILE" in told
    assert "sesame" not in told


def test_a_tenants_key_is_not_an_admin_key(monkeypatch):
    monkeypatch.setenv("TRIPTYCH_API_KEY", "one,two")
    monkeypatch.setenv("TRIPTYCH_ADMIN_KEY", "two")
    with pytest.raises(InvalidConfig, match="both an API key and an admin key"):
        read()


def test_where_there_are_several_keys_none_can_have_it_all():
    assert config.Config().share(10) == config.Config(api_key="a").share(10) == 10
    assert config.Config(api_key="a, b").share(10) == 5


@pytest.mark.parametrize("name", ["host", "worker_host"])
def test_an_empty_host_is_refused(tmp_path, name):
    assert f"{name}: must not be empty" in refusal(tmp_path, f'{name} = ""')
    with pytest.raises(InvalidConfig, match="must not be empty"):
        read("--" + name.replace("_", "-"), "")


def test_a_file_that_is_not_text_is_refused(tmp_path):
    file = tmp_path / "triptych.toml"
    file.write_bytes(b'model = "\xff"')
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read("--config", str(file))


@pytest.mark.parametrize("words", [["serve", "--port=80x"], ["serve", "--dtype=fp8"], ["bogus"]])
def test_a_wrong_word_is_answered_in_one_line(capsys, words):
    with pytest.raises(SystemExit) as left:
        main(words)
    told = capsys.readouterr().err
    assert left.value.code == 2
    assert told.count("\n") == 1
    assert "argument :" not in told
    assert "--help`" in told


def help_of(capsys, command, flag="--help"):
    with pytest.raises(SystemExit) as left:
        main([command, flag])
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_of_the_command(capsys, command):
    told = help_of(capsys, command)
    examples = told.split("examples:")[1].split("\n\n")[0]
    assert {line.split()[1] for line in examples.split("\n") if line} == {command}
    assert "(default: )" not in told
    if command not in cli.WITHOUT_SETTINGS:
        whole = help_of(capsys, command, "--help-all")
        assert "\ngeneral:" in whole
        assert set(flags_in(told)) < set(flags_in(whole))


def flags_in(text):
    return re.findall(r"^  (--[a-z-]+)", text, re.M)


@pytest.mark.parametrize("command", ["serve", "frontend", "worker"])
def test_help_shows_the_common_settings_and_says_where_the_others_are(capsys, command):
    """Proved with SHORT empty: --help shows all of them."""
    told = help_of(capsys, command)
    settings = {flag.name for flag in config.all_settings()}
    shown = [name for name in flags_in(told) if name in settings]
    assert 10 <= len(shown) <= 16
    assert len(shown) == len(set(shown))
    assert {"--model", "--pattern", "--enable-multimodal"} <= set(shown)
    assert "--help-all shows every setting" in told


def test_what_the_short_help_names_is_there():
    for command, groups in SHORT.items():
        known = {action.dest for action in subcommand(command)._actions}
        for _, names in groups:
            assert set(names) - known <= cli.HIDDEN_SETTINGS.get(command, set()), command


def subcommand(name):
    [commands] = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    return commands.choices[name].complete()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sevre"], "there is no command 'sevre'. Did you mean serve?"),
        (["xyzzy"], "there is no command 'xyzzy'."),
        (["serve", "--patern", "E/PD"], "arguments: --patern. Did you mean --pattern?"),
        (["serve", "--patern=E/PD"], "arguments: --patern=E/PD. Did you mean --pattern?"),
        (["serve", "--pat=E/PD"], "unrecognized arguments: --pat=E/PD"),  # names are whole
        (["ask", "What?", "--imgae", "a.png"], "--imgae. Did you mean --image?"),
        (["ask", "What?", "--words"], "unrecognized arguments: --words."),
        (["serve", "--routing=kvv"], "Did you mean kv?"),
        (["serve", "--limit-mm-per-prompt", "image=4"], "Use --limit-media, as in --limit-media"),
        (["serve", "--max-num-seqs=4"], "Use --torch-max-running. With --engine vllm give it in"),
        (["worker", "--role=E", "--tensor-parallel-size=2"], "give it in --engine-args. See"),
        (["serve", "--enable-auto-tool-choice"], "It is not needed: leave it out. See"),
        (["completion", "bsh"], "Did you mean bash?"),
    ],
)
def test_a_mistyped_name_gets_a_suggestion(capsys, words, said):
    with pytest.raises(SystemExit) as left:
        main(words)
    told = capsys.readouterr().err
    assert left.value.code == 2
    assert said in told
    assert told.count("\n") == 1


def test_what_replaces_the_flags_of_vllm_exists():
    known = {flag.name for flag in config.all_settings()}
    assert known.isdisjoint(VLLM_FLAGS)
    named = {flag for text in VLLM_FLAGS.values() for flag in re.findall(r"--[a-z-]+", text)}
    assert named <= known


def test_settings_that_name_a_path_say_so():
    """Shells complete them, and --help shows FILE or FOLDER."""
    path = re.compile(r"--(.*-)?(file|folder|dir|path|cert|ca|credentials|python|(tls|nats)-key)")
    for flag in config.all_settings():
        assert (flag.takes != "value") == bool(path.fullmatch(flag.name) or flag.name == "--model")


def test_frontend_and_worker_show_settings_that_apply_and_accept_the_rest(capsys):
    """What serve gives to both, and what stands in a file for both, must not be refused."""

    def told(command):
        return set(flags_in(help_of(capsys, command, "--help-all")))

    frontend, worker, serve = told("frontend"), told("worker"), told("serve")
    both = {"--model", "--pattern", "--join", "--namespace", "--run-dir", "--limits-decode-seconds"}
    assert both <= frontend & worker
    assert {"--port", "--routing", "--kv-events", "--limits-requests"} <= frontend - worker
    assert {"--device", "--kv-cache-bytes", "--cache-embeddings"} <= worker - frontend
    own = {"--role", "--index", "--ready-file"}
    left = {"--launch", "--engine-python", "--devices"} | {
        name for name in serve if name.startswith("--ray-")
    }
    assert frontend | worker == (serve | own) - left
    words = ["--role=E", "--port=1", "--no-kv-events", "--torch-kv-blocks=2", "--engine-python=x"]
    _parser().parse_args(["worker", *words])
    _parser().parse_args(["frontend", *words[1:]])


def test_an_impossible_pattern_is_refused_when_it_is_read():
    with pytest.raises(InvalidPattern):
        read("--pattern", "D/P")


def test_a_flag_wins_over_the_environment_and_that_over_the_file(monkeypatch, tmp_path):
    file = tmp_path / "triptych.toml"
    file.write_text('api_key = "file"')
    assert read("--config", str(file)).api_key == "file"
    monkeypatch.setenv("TRIPTYCH_API_KEY", "environment")
    assert read("--config", str(file)).api_key == "environment"


@pytest.mark.parametrize("words", [["frontend"], ["worker", "--role=E"]], ids=lambda w: w[0])
def test_a_single_process_refuses_devices_of_roles(capsys, words):
    """Only ``serve`` places workers. Proved with ``devices`` not in WITHOUT: it is ignored."""
    with pytest.raises(SystemExit) as left:
        main([*words, "--devices=E=cuda:0"])
    assert left.value.code == 2
    assert "unrecognized arguments: --devices" in capsys.readouterr().err


def test_keys_stay_out_of_command_lines(monkeypatch, tmp_path):
    """Nor is the file named twice: who has read it gives the keys on by the environment."""
    monkeypatch.setenv("TRIPTYCH_API_KEY", "sesame")
    (tmp_path / "keys").write_text("street")
    given = read(f"--admin-key-file={tmp_path / 'keys'}")
    assert (given.api_key, given.admin_key) == ("sesame", "street")
    assert config.to_flags(given) == []
    env = config.key_environment(given)
    assert env == {"TRIPTYCH_API_KEY": "sesame", "TRIPTYCH_ADMIN_KEY": "street"}
