"""Random JSON schemas in the shapes that clients send, and a check of answers against them.

Every schema bounds its texts and lists, so that an answer of a model that writes at random ends
within ``MAX_TOKENS``. Keywords are those that the published suites of JSON schema use and engine
torch honours; docs/interface.md lists those that it refuses.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema

MAX_TOKENS = 1500
PATTERNS = ("^[a-z]{1,6}$", "^[A-Z][a-z]{2,5}$", "^#[0-9a-f]{6}$", "^(red|green) [0-9]{2}$")
FORMATS = ("date", "time", "date-time", "ipv4", "uuid")

Schema = dict[str, Any]


def random_schema(number: int) -> Schema:
    """The schema of this number: always the same."""
    draw = random.Random(f"schema {number}")
    schema = _object(draw, 3)
    if draw.random() < 0.3:
        schema["$defs"] = {"shared": _value(draw, 1)}
        schema["properties"]["shared"] = {"$ref": "#/$defs/shared"}
        schema["required"] = [*schema["required"], "shared"]
    return schema


def recursive_schema() -> Schema:
    node = {
        "type": "object",
        "properties": {
            "value": {"type": "integer", "minimum": 0, "maximum": 9},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def check_answer(text: str, schema: Schema) -> None:
    """Raise unless the text is JSON that the schema takes."""
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def _value(draw: random.Random, depth: int) -> Schema:
    kinds = [_string, _integer, _number, _enum, _const, _boolean]
    if depth:
        kinds += [_object, _array, _any_of, _tuple]
    chosen = draw.choice(kinds)
    return chosen(draw, depth - 1)


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(
        ["id", "name", "größe", "a b", "x-y", "list", 'q"', "of"], draw.randint(1, 4)
    )
    properties = {name: _value(draw, max(depth - 1, 0)) for name in names}
    required = [name for name in names if draw.random() < 0.8]
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    return schema | {"additionalProperties": False}


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    return {
        "type": "array",
        "items": _value(draw, max(depth, 0)),
        "minItems": least,
        "maxItems": least + draw.randint(0, 2),
    }


def _tuple(draw: random.Random, depth: int) -> Schema:
    items = [_value(draw, 0) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_value(draw, max(depth, 0)) for _ in range(draw.randint(2, 3))]}


def _string(draw: random.Random, depth: int) -> Schema:
    match draw.randrange(4):
        case 0:
            return {"type": "string", "pattern": draw.choice(PATTERNS)}
        case 1:
            return {"type": "string", "format": draw.choice(FORMATS)}
        case _:
            least = draw.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 9)}


def _integer(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(-1000, 1000)
    schema: Schema = {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 5000)}
    return schema


def _number(draw: random.Random, depth: int) -> Schema:
    return {"enum": [round(draw.uniform(-9, 9), 3) for _ in range(3)]}


def _enum(draw: random.Random, depth: int) -> Schema:
    return {"enum": draw.sample(["red", "green", 7, None, True, "é🦊", "a\nb", [1, 2]], 3)}


def _const(draw: random.Random, depth: int) -> Schema:
    return {"const": draw.choice(["fixed", 42, None, {"k": [1]}])}


def _boolean(draw: random.Random, depth: int) -> Schema:
    return {"type": draw.choice(["boolean", ["boolean", "null"]])}
