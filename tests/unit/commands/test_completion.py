"""Scripts for shells. bash completes for real; zsh and fish too where they are installed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.terminals import typed_terminal
from triptych.cli import COMMANDS, _parser, main
from triptych.commands.completion import SHELLS, collect_commands
from triptych.config import KEYS, all_settings


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    commands = collect_commands(_parser())
    for shell, write in SHELLS.items():
        (folder / shell).write_text(write(commands))
    return folder


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my models").mkdir()
    (tmp_path / "my notes.toml").touch()
    return tmp_path


def test_every_command_and_setting_is_there():
    first, *commands = collect_commands(_parser())
    assert {flag.name for flag in first.flags} == {"-h", "--help", "--version"}
    assert [command.name for command in commands] == list(COMMANDS)
    serve = {flag.name: flag for flag in commands[0].flags}
    for setting in all_settings():
        assert (setting.name in serve) == (setting.path[0] not in KEYS)
    assert serve["--routing"].values == ("round-robin", "random", "least-loaded", "kv")
    assert serve["--api-key-file"].takes == "file"
    assert serve["--model"].takes == "folder"
    assert serve["--no-enable-multimodal"].takes == "none"
    assert serve["--port"].takes == "value"


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_the_script(shell, scripts, capsys):
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == (scripts / shell).read_text()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_can_read_its_script(shell, scripts):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run([shell, "-n", scripts / shell], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


ASK = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_triptych
printf '%s\\n' "${COMPREPLY[@]}"
"""


def bash(scripts, folder, *words):
    argv = ["bash", "-c", ASK, "bash", scripts / "bash", "triptych", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=folder)
    assert done.stderr == ""
    return [line for line in done.stdout.split("\n") if line]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([""], list(COMMANDS)),
        (["se"], ["serve"]),
        (["--v"], ["--version"]),
        (["serve", "--patt"], ["--pattern"]),
        (["serve", "--routing", ""], ["round-robin", "random", "least-loaded", "kv"]),
        (["serve", "--routing", "=", "k"], ["kv"]),  # as bash divides --routing=k
        (["serve", "--routing", "="], ["round-robin", "random", "least-loaded", "kv"]),
        (["serve", "--pattern", "E/"], ["E/PD", "E/P/D"]),
        (["serve", "--tool-parser", "h"], ["hermes"]),
        (["serve", "--reasoning-parser", "t"], ["think"]),
        (["serve", "--config", "my"], ["my models", "my notes.toml"]),
        (["serve", "--model", "my"], ["my models"]),
        (["serve", "my"], ["my models"]),
        (["serve", "--port", ""], []),
        (["serve", "--nothing"], []),
        (["ask", "What?", "my"], ["my models", "my notes.toml"]),
        (["ask", "--image", "my n"], ["my notes.toml"]),
        (["render", "--image", "my"], []),  # the name of a container's image
        (["render", ""], ["compose", "kubernetes"]),
        (["completion", ""], list(SHELLS)),
        (["worker", "--role", "E"], ["E", "EP", "EPD"]),
    ],
)
def test_bash_completes(scripts, folder, words, found):
    assert sorted(bash(scripts, folder, *words)) == sorted(found)


def test_bash_completes_what_is_typed(scripts, folder):
    argv = ["bash", "--norc", "--noprofile", "-i"]
    with typed_terminal(argv, PS1="$ ", HOME=str(folder), HISTFILE="") as terminal:
        terminal.type(f"source {scripts / 'bash'}; cd {folder}; PS1='rea''dy '\n")
        terminal.expect("ready ")
        terminal.type("triptych comp\t")
        terminal.expect("triptych completion ")
        terminal.type("\x15triptych ask hi my\\ n\t")  # Ctrl-U empties the line
        terminal.expect("my\\ notes.toml ")


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("triptych se", {"serve"}),
        ("triptych serve --patt", {"--pattern"}),
        ("triptych serve --routing k", {"kv"}),
        ("triptych completion ", set(SHELLS)),
    ],
)
def test_fish_completes(scripts, folder, line, found):
    code = f"source {scripts / 'fish'}; complete -C '{line}'"
    argv = ["fish", "--no-config", "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=folder)
    assert {shown.split("\t")[0] for shown in done.stdout.splitlines()} == found


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_completes_what_is_typed(scripts, folder):
    with typed_terminal(["zsh", "-f", "-i"], HOME=str(folder)) as terminal:
        set_up = "autoload -Uz compinit; compinit -u -D"
        terminal.type(f"{set_up}; source {scripts / 'zsh'}; PS1='rea''dy '\n")
        terminal.expect("ready ")
        terminal.type("triptych serve --patt\t")
        terminal.expect("--pattern=")
        terminal.type("EP/\t")
        terminal.expect("D")


def test_the_page_creates_each_folder_before_its_script():
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    folders = re.findall(r"^triptych completion \w+ > (\S+)/[^/\s]+$", page, re.MULTILINE)
    assert len(folders) == len(SHELLS)
    for folder in folders:
        assert f"mkdir -p {folder}\n" in page
