"""Reading media URLs: nothing that two readers could take for two things."""

from ipaddress import IPv6Address
from urllib.parse import urlsplit

import pytest
import yarl
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.errors import InvalidConfig, MediaURLBlocked, UnsupportedURLScheme
from triptych.sources.url import MAX_URL_CHARACTERS, AllowedDomains, parse_url, resolve_redirect

MAPPED = str(IPv6Address("::ffff:7f00:1"))  # Python 3.13 writes ::ffff:127.0.0.1


@pytest.mark.parametrize(
    ("text", "host", "written"),
    [
        ("http://example.com", "example.com", "http://example.com/"),
        ("HTTPS://EXAMPLE.com:8443/A", "example.com", "https://example.com:8443/A"),
        ("http://example.com./a", "example.com", "http://example.com./a"),
        ("http://h?q=//other/", "h", "http://h/?q=//other/"),
        ("http://h/a%20b?x=%26y#part", "h", "http://h/a%20b?x=%26y"),
        ("http://bücher.de/ü", "xn--bcher-kva.de", "http://xn--bcher-kva.de/%C3%BC"),
        ("http://\uff11\uff12\uff17.0.0.1/", "127.0.0.1", "http://127.0.0.1/"),
        ("http://\u24d4xample.com/", "example.com", "http://example.com/"),
        ("http://[0:0:0:0:0:0:0:1]:80/", "::1", "http://[::1]:80/"),
        ("http://[::ffff:127.0.0.1]/", MAPPED, f"http://[{MAPPED}]/"),
        ("http://a_b-c.test/@x", "a_b-c.test", "http://a_b-c.test/@x"),
        ("http://ok#@127.0.0.1/", "ok", "http://ok/"),
    ],
)
def test_reads(text, host, written):
    url = parse_url(text)
    assert url.host == host
    assert str(url.url) == str(yarl.URL(written))
    assert url.secure == written.startswith("https")


def test_distinguishes_addresses_from_names():
    assert parse_url("http://127.0.0.1/").is_address
    assert parse_url("http://[::1]/").is_address
    assert not parse_url("http://a1.b2/").is_address


@pytest.mark.parametrize(
    "text",
    [
        "http://ok\\@127.0.0.1/",
        "http://ok\\.test/",
        "http:\\\\ok/",
        "http://ok/\\..",
        "http://user@127.0.0.1/",
        "http://user:word@127.0.0.1/",
        "http://ok:80@127.0.0.1/",
        "http://@127.0.0.1/",
        "http://ok%40127.0.0.1/",
        "http://127.0.0.1%2f.ok/",
        "http://%31%32%37.0.0.1/",
        "http:127.0.0.1/",
        "http:/127.0.0.1/",
        "http:///127.0.0.1/",
        "http://",
        "http://?a",
        "http://:80/",
        "http://ok:/",
        "http://ok:0/",
        "http://ok:65536/",
        "http://ok:+80/",
        "http://ok:\uff18\uff10/",
        "http://ok:80:81/",
        "http://ok /",
        "http://ok/ a",
        "http://o\tk/",
        "http://o\nk/",
        "http://ok/\r\nHost: other",
        "http://ok/\x00",
        "http://ok/\x7f",
        "http://ok/\u2028",
        "http://o\u200bk/",
        "http://o\u00adk/",
        "http://ok/\ud800",
        "http://[::1",
        "http://::1/",
        "http://[::1%25lo]/",
        "http://[::1%lo]/",
        "http://[127.0.0.1]/",
        "http://[ok]/",
        "http://[::1]ok/",
        "http://[v1.x]/",
        "http://127.1/",
        "http://127.0.1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.0.0.1/",
        "http://0177.0.0.1/",
        "http://127.0.0.01/",
        "http://1.2.3.4.5/",
        "http://ok.0x/",
        "http://256.1.1.1/",
        "http://127.0.0.1../",
        "http://a..b/",
        "http://.a/",
        "http://a,b/",
        "http://a;b/",
        "http://a*b/",
        "http://a'b/",
        f"http://{'a' * 64}.test/",
        f"http://{'a.' * 127}aa/",
        "http://xn--\u00fc/",
        "http://ok/" + "a" * MAX_URL_CHARACTERS,
    ],
)
def test_b20_refuses_what_can_be_misread(text):
    with pytest.raises(MediaURLBlocked) as caught:
        parse_url(text)
    assert "127" not in caught.value.message


@pytest.mark.parametrize(
    ("reader", "finds"),
    [("urlsplit", urlsplit("http://other/")), ("yarl.URL", yarl.URL("http://b/"))],
)
def test_b20_urls_that_readers_read_differently_are_refused(reader, finds, monkeypatch):
    monkeypatch.setattr(f"triptych.sources.url.{reader}", lambda text: finds)
    with pytest.raises(MediaURLBlocked, match="two ways"):
        parse_url("http://ok/")


@pytest.mark.parametrize(
    "text",
    [
        "ftp://a/",
        "gopher://a/",
        "file:///a",
        "data:,a",
        "javascript:1",
        "",
        "a.png",
        "//a/b",
        "://a",
        " http://a/",
        "\thttp://a/",
        "ht\ntp://a/",
        "httpx://a/",
        "ws://a/",
        "1http://a/",
    ],
)
def test_b21_other_schemes_are_unsupported(text):
    with pytest.raises(UnsupportedURLScheme):
        parse_url(text)


@settings(deadline=None)
@given(
    st.one_of(
        st.text(max_size=60),
        st.text("ok.test127:/@\\?#[]%0xfF-_ \t\n\u3002\uff0e\uff11\uff12", max_size=40),
    ).map(lambda rest: "http://" + rest)
)
def test_b20_whatever_is_read_every_reader_finds_the_same_host(text):
    try:
        url = parse_url(text)
    except MediaURLBlocked:
        return
    again = urlsplit(str(url.url))
    assert (again.hostname or "").rstrip(".") == url.host
    assert again.username is None
    assert again.password is None
    assert "@" not in again.netloc
    assert url.host.isascii()
    assert parse_url(str(url.url)) == url  # and it is read so ever after


@pytest.mark.parametrize(
    ("location", "to"),
    [
        ("/b", "http://ok:81/b"),
        ("b", "http://ok:81/a/b"),
        ("?q", "http://ok:81/a/x?q"),
        ("../b", "http://ok:81/b"),
        ("//other/b", "http://other/b"),
        ("https://other/b", "https://other/b"),
        ("b:c", None),
        ("http:b", None),
        ("//user@other/", None),
        ("\\\\other", None),
        ("/\\other", None),
        ("b c", None),
    ],
)
def test_where_a_redirect_leads(location, to):
    base = parse_url("http://ok:81/a/x?old")
    if to is None:
        with pytest.raises((MediaURLBlocked, UnsupportedURLScheme)):
            resolve_redirect(base, location)
    else:
        assert str(resolve_redirect(base, location).url) == to


@settings(deadline=None)
@given(st.text(max_size=40))
def test_a_relative_redirect_stays_on_its_host(location):
    try:
        url = resolve_redirect(parse_url("http://ok.test/a"), "/." + location)
    except MediaURLBlocked:
        return
    assert url.host == "ok.test"


def test_domains_and_what_is_below_them():
    domains = AllowedDomains("example.com, .cdn.test,bücher.de,10.0.0.1,[fd00::1]")
    for host in ("example.com", "a.example.com", "x.cdn.test", "xn--bcher-kva.de", "10.0.0.1"):
        assert domains.permit(host), host
    assert domains.permit("fd00::1")
    for host in ("notexample.com", "example.com.evil.test", "cdn.test", "com", "evilcdn.test"):
        assert not domains.permit(host), host
    assert AllowedDomains("").permit("anything")
    assert AllowedDomains(" , ").permit("anything")


@pytest.mark.parametrize("text", ["http://a", "a:80", "*.a", "a b", ".", "a/b", "127.1"])
def test_invalid_domains_are_refused_at_the_start(text):
    with pytest.raises(InvalidConfig, match="allowed-media-domains"):
        AllowedDomains(text)
