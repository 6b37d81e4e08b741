"""The file of named keys: what it takes, and what its errors say."""

import hashlib
from datetime import UTC, datetime

import pytest

from triptych.api.key_file import read_key_file
from triptych.api.rate_limits import KeyLimits
from triptych.errors import InvalidConfig

SHA = "ab" * 32


def written(tmp_path, text):
    file = tmp_path / "keys.toml"
    file.write_text(text)
    return str(file)


def test_names_digests_expiry_and_limits(tmp_path):
    keys = read_key_file(
        written(
            tmp_path,
            f"""
            [[key]]
            name = "alice"
            key = "secret"
            expires = 2027-01-31T12:00:00+01:00
            requests_per_minute = 60
            tokens_per_minute = 10_000
            media_bytes_per_minute = 1
            streams = 4
            [[key]]
            name = "bob@example.com"
            sha256 = "{SHA.upper()}"
            expires = 2027-01-31
            """,
        )
    )
    alice, bob = keys
    assert alice.digest == hashlib.sha256(b"secret").digest()
    assert alice.limits == KeyLimits(60, 10_000, 1, 4)
    assert alice.expires == datetime(2027, 1, 31, 11, tzinfo=UTC).timestamp()
    assert (bob.name, bob.digest, bob.limits) == ("bob@example.com", b"\xab" * 32, KeyLimits())
    assert bob.expires == datetime(2027, 1, 31, tzinfo=UTC).timestamp()


def entry(**fields):
    lines = "\n".join(f"{name} = {value!r}" for name, value in fields.items())
    return f"[[key]]\n{lines}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has no key"),
        ("key = 1", "begin each key with .*key"),
        ("[[key", "is not TOML"),
        (entry(name="a"), "either 'key' or 'sha256'"),
        (entry(name="a", key="hidden", sha256=SHA), "either 'key' or 'sha256'"),
        (entry(key="hidden"), "number 1 has no 'name'"),
        (entry(name="a b", key="hidden"), "number 1: 'name' must be 1 to 64 letters"),
        (entry(name="", key="hidden"), "'name' must be 1 to 64 letters"),
        (entry(name="a", key=""), "'key' must be a text that is not empty"),
        (entry(name="a", key=" hidden"), "spaces around it"),
        (entry(name="a", sha256="abc"), "'sha256' must be 64 hexadecimal digits"),
        (
            entry(name="b", key="x") + entry(name="a", key="hidden", token_per_minute=1),
            r"number 2 has an unknown name 'token_per_minute'. Did you mean tokens_per_minute\?",
        ),
        (entry(name="a", key="hidden", nonsense=1), "has an unknown name 'nonsense'.$"),
        ("[key]\nname = 'a'", r"begin each key with \[\[key\]\]"),
        ("[[keys]]\nname = 'a'", r"there is no 'keys'.*Did you mean \[\[key\]\]\?"),
        ("[[user]]\nname = 'a'", "there is no 'user': it has .* tables alone.$"),
        (entry(name="a", key="hidden", streams=0), "'streams' must be a whole number of 1 or more"),
        (entry(name="a", key="hidden", requests_per_minute=-1), "'requests_per_minute' must be a"),
        (entry(name="a", key="hidden", requests_per_minute="many"), "must be a whole number"),
        (entry(name="a", key="hidden", expires="soon"), "expires"),
        (
            entry(name="a", key="hidden") + entry(name="b", key="hidden"),
            "'a' and 'b' have the same",
        ),
        (
            entry(name="a", key="hidden") + entry(name="a", key="hidden2", streams=2),
            "different limits",
        ),
    ],
)
def test_what_is_wrong_is_said_without_the_key(tmp_path, text, said):
    with pytest.raises(InvalidConfig, match=said) as refused:
        read_key_file(written(tmp_path, text))
    assert "--keys-file" in str(refused.value)
    assert "hidden" not in str(refused.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_key_file(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_key_file(str(tmp_path / "binary"))
