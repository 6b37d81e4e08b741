"""Measures the code of the package, as a table: python tools/measure_code.py [CHECKOUT]

Code lines are lines with code on them: comments, blank lines and docstrings do not count. The
spine is the modules that the numbered list of docs/architecture.md names. A broad except catches or
suppresses Exception, BaseException or everything. A repeated name is a type (class or alias) or a
public function that several modules define at their top level. INTERFACES lists those that are
meant: modules of one kind define them for the same caller.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
BROAD = {"Exception", "BaseException"}
INTERFACES: dict[str, tuple[tuple[str, ...], str]] = {
    "load": (
        ("engines/*",),
        "builds an engine or an encoder, for the worker that chose it by name",
    ),
    "main": (("*",), "runs a process or a command line"),
    "open_plane": (("runtime/planes/*",), "opens a request plane that was chosen by name"),
    "open_transport": (("transfer/*",), "opens a transport that the registry names"),
    "prepare": (("media/*",), "prepares one kind of media in the sandbox, as its recipe says"),
    "load_libraries": (("media/*",), "what a sandbox imports before it is locked down"),
    "self_test": (("media/*",), "whether a sandbox can decode at all"),
    "run": (("commands/*", "deploy/*"), "runs one command of the CLI"),
}


def count_code_lines(source: str) -> int:
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT and token.start not in docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def find_types(source: str) -> Iterator[str]:
    """Classes and type aliases at the top level of a module."""
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.ClassDef):
            yield node.name
        for target in targets:
            if isinstance(target, ast.Name) and re.match("[A-Z][a-z]", target.id):
                yield target.id


def find_public_functions(source: str) -> Iterator[str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
            "_"
        ):
            yield node.name


def find_repeated(package: Path, find: Callable[[str], Iterator[str]]) -> dict[str, list[str]]:
    """Names that more than one module defines, with these modules. Interfaces do not count."""
    modules: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).as_posix()
        for name in set(find(path.read_text())):
            globs, _ = INTERFACES.get(name, ((), ""))
            if not any(fnmatch(module, glob) for glob in globs):
                modules.setdefault(name, []).append(module)
    return {name: paths for name, paths in sorted(modules.items()) if len(paths) > 1}


def count_broad_excepts(source: str) -> int:
    def is_broad(kind: ast.expr | None) -> bool:
        if isinstance(kind, ast.Tuple):
            return any(is_broad(one) for one in kind.elts)
        return kind is None or (isinstance(kind, ast.Name) and kind.id in BROAD)

    def is_broad_suppress(call: ast.Call) -> bool:
        return ast.unparse(call.func).endswith("suppress") and any(map(is_broad, call.args))

    return sum(
        (isinstance(node, ast.ExceptHandler) and is_broad(node.type))
        or (isinstance(node, ast.Call) and is_broad_suppress(node))
        for node in ast.walk(ast.parse(source))
    )


def find_spine(checkout: Path) -> list[Path]:
    """The modules that the numbered list of docs/architecture.md names."""
    text = (checkout / "docs" / "architecture.md").read_text()
    steps = "".join(re.findall(r"^\d+\. .*\n(?: +.*\n)*", text, re.MULTILINE))
    modules = set()
    for dotted in re.findall(r"`([a-z_0-9]+(?:\.\w+)+)`", steps):
        path = checkout / "src" / "triptych"
        for part in dotted.split("."):
            path /= part
            if path.with_suffix(".py").is_file():
                modules.add(path.with_suffix(".py"))
                break
    return sorted(modules)


def measure(checkout: Path) -> list[tuple[str, str]]:
    package = checkout / "src" / "triptych"
    sources = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    lines = {path: count_code_lines(source) for path, source in sources.items()}
    spine = find_spine(checkout)
    return [
        ("files / code lines", f"{len(lines)} / {sum(lines.values()):,}"),
        (
            "E/P/D spine: files / code lines",
            f"{len(spine)} / {sum(lines[path] for path in spine):,}",
        ),
        ("types defined in two modules", str(len(find_repeated(package, find_types)))),
        (
            "public functions defined in two modules",
            str(len(find_repeated(package, find_public_functions))),
        ),
        ("broad excepts", str(sum(map(count_broad_excepts, sources.values())))),
    ]


def main() -> None:
    checkout = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    print("| measure | value |")
    print("|---|---|")
    for name, value in measure(checkout):
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
