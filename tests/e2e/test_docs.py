"""What the documents say is so: links, names, settings, the snippet and the demo."""

import base64
import contextlib
import functools
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tools import tiny

from support import clips, pictures
from support.servers import serving
from triptych import config, models
from triptych.checkpoint import open_model
from triptych.cli import _parser
from triptych.commands.demo import examples
from triptych.config import Limits, all_settings
from triptych.deploy.container import Containers
from triptych.media import embeds
from triptych.recipe import EmbedsFormat

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README = (ROOT / "README.md").read_text()


def resolve(name):
    """``pipeline.run.Pipeline.run`` below triptych, to whatever it names."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(["triptych", *parts[:end]]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[end:], module)
    raise AssertionError(f"{name} names nothing")


def test_every_step_of_the_architecture_names_something_that_is_there():
    text = (ROOT / "docs/architecture.md").read_text()
    life = text.split("## A request's life")[1].split("\n## ")[0]
    names = re.findall(r"`([a-z_]+(?:\.\w+)+)`", life)
    assert len(names) >= 15
    for name in names:
        resolve(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


def test_the_tree_in_the_readme_is_the_tree():
    tree = README.split("## The tree")[1].split("```")[1]
    package = ROOT / "src/triptych"
    for folder in package.iterdir():
        if (folder / "__init__.py").is_file():
            assert f"  {folder.name}/" in tree, folder.name
    for name in re.findall(r"(\w+\.py)", tree):
        assert (package / name).is_file(), name
    assert {path.name for path in package.glob("[!_]*.py")} <= set(re.findall(r"\w+\.py", tree))
    for folder, inner in re.findall(r"^  (\w+)/( .*(?:\n {20}.*)*)", tree, re.MULTILINE):
        for name in re.findall(r"(\w+)/", inner):
            assert (package / folder / name).is_dir() or (ROOT / name).is_dir(), name


def test_make_targets_of_the_readme_are_there():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    for target in re.findall(
        r"^make ([a-z]+)", README + (ROOT / "CONTRIBUTING.md").read_text(), re.M
    ):
        assert target in targets


@pytest.mark.parametrize("file", sorted(ROOT.glob("deploy/*.toml")), ids=lambda p: p.name)
def test_settings_files_are_valid(file):
    read = config.load_config(tomllib.loads(file.read_text()), {})
    assert file.stem == read.pattern.lower().replace("/", "-")


def test_help_teaches_every_setting():
    done = subprocess.run(
        [sys.executable, "-m", "triptych", "serve", "--help-all"], capture_output=True, text=True
    )
    assert done.returncode == 0
    for flag in all_settings():
        assert flag.name in done.stdout
    assert "E*2/P/D*3" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_can_be_read_and_typed(page):
    """Those in code blocks: every word is known, and no shell takes a ``*`` for files."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.S | re.M)
    for line in "\n".join(blocks).splitlines():
        if line.startswith("triptych "):
            words = shlex.split(line.partition(" > ")[0], comments=True)
            _parser().parse_args(words[1:])
            assert not any("*" in word and f"'{word}'" not in line for word in words)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_flags_in_documents_are_there(page):
    known = {flag.name for flag in all_settings()} | {
        "--config",
        "--role",
        "--index",
        "--help",
        "--kind",
    }
    known |= {flag.name for flag in all_settings(Containers)} | {
        "--ready-file",
        "--env-file",
        "--head",
    }
    known |= {"--address", "--image", "--video", "--audio", "--url", "--max-tokens", "--json"}
    known |= {"--help-all", "--system", "--temperature", "--no-history"}
    known |= {"--build-arg", "--no-deps"}  # of docker and pip
    known |= {"--version", "--data-binary", "--quick", "--strict"}  # also of curl and our tools
    known |= {"--max-num-seqs", "--enforce-eager", "--data-parallel-size"}  # of engines
    known |= {"--tensor-parallel-size", "--mem-fraction-static"}
    if page.name == "CHANGELOG.md":
        known |= {"--torch-kv-bytes", "--torch-threads"}  # removed names
    for name in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]\b(?!\.)(?!-)", page.read_text()):
        assert name in known, name


VALUE = r"((?:[\d.,]*\d)(?: (?:[KMG]iB|s))?|one hour)(?=[\s):|])"
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "s": 1}


def as_number(text):
    """``64 MiB``, ``20 s``, ``64,000,000`` or ``one hour``."""
    if text == "one hour":
        return 3600
    number, _, unit = text.replace(",", "").partition(" ")
    return float(number) * UNITS.get(unit, 1)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_limits_in_documents_are_those_of_the_settings(page):
    """A value in brackets or in the next cell of a table, after the name of the limit."""
    defaults = {flag.name: flag.default for flag in all_settings() if flag.path[0] == "limits"}
    told = re.findall(rf"`(--limits-[a-z-]+)`(?: [a-z ]+)?\s+(?:\(|\| ){VALUE}", page.read_text())
    for name, value in told:
        assert as_number(value) == defaults[name], name
    if page.name == "interface.md":
        named = set(re.findall(r"`(--limits-[a-z-]+)`", page.read_text()))
        assert named == {name for name, _ in told}, "each has its value"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_encoders_of_documented_commands_take_media(page):
    """Finding 11: without --enable-multimodal they would be refused."""
    for line in page.read_text().splitlines():
        if not re.match(r"triptych +(serve|frontend|worker) .*--pattern", line):
            continue
        args = _parser().parse_args(shlex.split(line.partition(" > ")[0], comments=True)[1:])
        roles = config.Topology.parse(args.pattern).roles
        if "E" in roles and getattr(args, "engine", "") != "fake":
            assert getattr(args, "enable_multimodal", False), line


def test_what_is_to_be_installed_can_be():
    """From a checkout, or a wheel that was made there: Triptych is in no index of packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wheel = f"./triptych-{project['version']}-py3-none-any.whl"
    extras = {*project["optional-dependencies"], "{extra}"}
    found = set()
    for file in [*PAGES, *ROOT.glob("src/**/*.py")]:
        for place, named in re.findall(
            r"pip install [^\n']*'([^'\[]*)\[([^'\]]*)\](?:==[^']*)?'", file.read_text()
        ):
            # With its version it is the Triptych that is installed already.
            assert place in (".", wheel, "triptych", "/path/to/triptych", "{_source()}"), file
            assert set(named.split(",")) <= extras, file
            found.add(place)
    assert found == {".", wheel, "triptych", "/path/to/triptych", "{_source()}"}


def test_the_readmes_snippet_runs():
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    picture = (ROOT / "src/triptych/assets/examples/circles.png").read_bytes()
    with serving("--engine=fake", "--pattern=E/PD", "--enable-multimodal") as server:
        code = code.replace("http://127.0.0.1:8000", server.url)
        code = code.replace("base64,...", f"base64,{base64.b64encode(picture).decode()}")
        names = {}
        exec(code, names)  # our own README
        assert names["answer"].choices[0].message.content
        names["client"].close()


def test_the_client_of_tools_without_a_model_runs(tmp_path, capsys):
    page = (ROOT / "docs/engines.md").read_text().split("## Test a client's tools")[1]
    blocks = dict(re.findall(r"```(json|jinja|python)\n(.*?)```", page, re.S))
    (tmp_path / "replies.jsonl").write_text(blocks["json"])
    (tmp_path / "tools.jinja").write_text(blocks["jinja"])
    words = shlex.split(re.search(r"^triptych serve (.*)$", page, re.M)[1])
    names = ("tools.jinja", "replies.jsonl")
    with serving(*(str(tmp_path / word) if word in names else word for word in words)) as server:
        code = blocks["python"].replace("http://127.0.0.1:8000", server.url)
        scope = {}
        exec(code.replace('"qwen"', f'"{server.model}"'), scope)  # our own page
        scope["client"].close()
    assert capsys.readouterr().out.splitlines() == re.findall(r"\)\s+# (.*)", code)


def test_the_models_of_the_table_take_what_it_says():
    page = (ROOT / "docs/models.md").read_text()
    told = {
        cells[1].strip("` "): [cell.strip() for cell in cells[2:5]]
        for line in page.splitlines()
        if len(cells := line.strip("|").split("|")) == 6 and cells[1].strip().startswith("`")
        if cells[1].strip() != "`model_type`"
    }
    assert told.keys() == models.FAMILIES.keys() - {"qwen2_5_omni_thinker"}
    for family, cells in told.items():
        recipes = models.find_family(open_model(str(tiny.ensure_checkpoint(family)))).recipes
        taken = [recipes.image, recipes.video, recipes.audio]
        assert cells == ["yes" if recipe else "" for recipe in taken], family


def test_the_embedding_of_the_snippet_is_accepted(tmp_path):
    folder = tiny.ensure_checkpoint("qwen2_5_vl")
    page = (ROOT / "docs/models.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.S)[1]
    code = code.replace("./Qwen2.5-VL-7B-Instruct", str(folder))
    (tmp_path / "picture.png").write_bytes(pictures.encoded(pictures.draw(1, 84, 56)))
    with contextlib.chdir(tmp_path):
        exec(code, {})  # our own page
    data = memoryview((tmp_path / "picture.safetensors").read_bytes())
    recipe = EmbedsFormat(models.find_family(open_model(str(folder))).width, "float32", merge=2)
    meta, [rows], _ = embeds.prepare_embeds("image", data, recipe, Limits(), False)
    assert meta.tokens == len(rows) == 6


def test_the_request_of_the_interface_is_answered_and_the_metrics_are_there(tmp_path):
    page = (ROOT / "docs/interface.md").read_text()
    words = shlex.split(re.search(r"```\n(curl .*?)```", page, re.S)[1])
    (tmp_path / "cat.jpg").write_bytes(pictures.encoded(pictures.draw(1, 84, 56), "JPEG"))
    (tmp_path / "cat.mp4").write_bytes(clips.video(1))
    flags = ["--engine=fake", "--fake-decode", "--enable-multimodal", "--pattern=E/PD"]
    with serving(*flags, f"--allowed-media-path={tmp_path}") as server:
        assert words[1].startswith("http://127.0.0.1:8000/")
        body = words[words.index("-d") + 1].replace("MODEL", server.model)
        for known in ("https://example.com", "file:///srv/media"):
            assert known in body
            body = body.replace(known, f"file://{tmp_path}")
        reply = server.request(words[1].removeprefix("http://127.0.0.1:8000"), body.encode())
        assert reply.status == 200, reply.body
        assert server.request("/v1/media", b"kept").json["id"].startswith("media://")
        shown = {
            re.split(r"[ {]", line)[0]
            for line in server.request("/metrics").body.decode().splitlines()
            if not line.startswith("#")
        }
    watch = (ROOT / "docs/operations.md").read_text().split("## Watch")[1].split("\n## ")[0]
    named = re.findall(r"`((?:triptych_|\.\.\._)[a-z_]+(?:\.\.\.)?)`", watch)
    assert len(named) >= 20
    for name in named:
        pattern = re.escape(name).replace(r"\.\.\.", ".*")
        assert any(re.fullmatch(pattern, one) for one in shown), name


def test_the_demo_asks_and_answers():
    argv = [sys.executable, "-m", "triptych", "demo", "--engine=fake", "--pattern=E/P/D"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    taken = [one for one in examples() if all(item.kind != "audio" for item in one.media)]
    _, *shown = re.split(r"^(?=  \d/\d  )", done.stdout, flags=re.M)
    assert len(shown) == len(taken), done.stdout
    for text, one in zip(shown, taken, strict=True):
        for item in one.media:
            assert item.file in text
        for line in ("question ", "answer ", "fetch ", ".* encode ", ".* transfer ", ".*decode "):
            assert re.search(rf"^  {line}", text, re.M), text
    assert "answers are invented" in done.stdout


def test_the_demo_answers_rightly():
    argv = [sys.executable, "-m", "triptych", "demo"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"\n{len(examples())} of {len(examples())} answers are right.\n")
