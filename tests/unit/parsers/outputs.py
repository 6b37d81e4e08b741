"""Parse texts in pieces, and put the deltas together again."""

from collections.abc import Iterable, Iterator

from triptych.parsers.base import OutputParser, ParsedOutput

Whole = tuple[str, str, list[tuple[str, str]]]  # content, reasoning, calls


def parse(parser: OutputParser, pieces: Iterable[str]) -> Whole:
    content = reasoning = ""
    names: list[str] = []
    arguments: list[str] = []
    for parsed in outputs(parser, pieces):
        content += parsed.content
        reasoning += parsed.reasoning
        for call in parsed.calls:
            if call.name:
                assert call.index == len(names), "calls begin in order"
                names.append(call.name)
                arguments.append("")
            assert call.index == len(names) - 1, "deltas belong to the last call"
            arguments[call.index] += call.arguments
    return content, reasoning, list(zip(names, arguments, strict=True))


def outputs(parser: OutputParser, pieces: Iterable[str]) -> Iterator[ParsedOutput]:
    yield from map(parser.push, pieces)
    yield parser.finish()
