"""Token buckets and quotas, by a clock that the test sets."""

import math

import pytest

from triptych.api.rate_limits import KeyLimits, KeyQuota, TokenBucket
from triptych.errors import RateLimitExceeded


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_bucket_holds_a_minute_and_refills_all_the_time(clock):
    bucket = TokenBucket(60, clock)
    bucket.take(60)
    assert bucket.level == 0
    clock.now = 1.5
    assert bucket.level == 1.5
    assert bucket.seconds_until(60) == 58.5
    clock.now = 1000.0
    assert bucket.level == 60  # no more than a minute's worth


def test_requests_are_admitted_one_by_one(clock):
    quota = KeyQuota(KeyLimits(requests_per_minute=3), clock)
    for _ in range(3):
        quota.admit()
    with pytest.raises(RateLimitExceeded, match="3 requests a minute") as refused:
        quota.admit()
    assert math.isclose(refused.value.retry_seconds, 20.0)
    clock.now = 19.9
    with pytest.raises(RateLimitExceeded):
        quota.admit()
    clock.now = 20.1
    quota.admit()
    with pytest.raises(RateLimitExceeded):
        quota.admit()


def test_tokens_are_counted_after_the_fact_and_a_debt_is_refilled_first(clock):
    quota = KeyQuota(KeyLimits(tokens_per_minute=60), clock)
    quota.admit()
    quota.count_tokens(90)  # more than was left
    with pytest.raises(RateLimitExceeded, match="60 tokens a minute") as refused:
        quota.admit()
    assert math.isclose(refused.value.retry_seconds, 31.0)
    clock.now = 30.5
    quota.admit()


def test_a_request_that_tokens_refuse_is_not_counted(clock):
    quota = KeyQuota(KeyLimits(requests_per_minute=5, tokens_per_minute=1), clock)
    quota.count_tokens(1)
    with pytest.raises(RateLimitExceeded, match="tokens"):
        quota.admit()
    assert b"x-ratelimit-remaining-requests: 5\r\n" in quota.headers()


def test_media_are_limited_apart(clock):
    quota = KeyQuota(KeyLimits(media_bytes_per_minute=100), clock)
    quota.check_media()
    quota.count_media(101)
    with pytest.raises(RateLimitExceeded, match="100 media bytes a minute"):
        quota.check_media()
    quota.admit()  # text goes on
    assert quota.headers() == b""


def test_requests_at_once(clock):
    quota = KeyQuota(KeyLimits(streams=2), clock)
    quota.start()
    quota.start()
    with pytest.raises(RateLimitExceeded, match="may have 2 requests at a time"):
        quota.start()
    quota.end()
    quota.start()
    single = KeyQuota(KeyLimits(streams=1), clock)
    single.start()
    with pytest.raises(RateLimitExceeded, match="may have 1 request at a time"):
        single.start()


def test_headers_say_what_is_left_and_when_it_is_full(clock):
    quota = KeyQuota(KeyLimits(requests_per_minute=60, tokens_per_minute=600), clock)
    quota.admit()
    quota.count_tokens(1200)
    assert quota.headers().decode().split("\r\n") == [
        "x-ratelimit-limit-requests: 60",
        "x-ratelimit-remaining-requests: 59",
        "x-ratelimit-reset-requests: 1.000s",
        "x-ratelimit-limit-tokens: 600",
        "x-ratelimit-remaining-tokens: 0",
        "x-ratelimit-reset-tokens: 120.000s",
        "",
    ]


def test_new_limits_keep_what_was_used(clock):
    quota = KeyQuota(KeyLimits(requests_per_minute=10), clock)
    for _ in range(8):
        quota.admit()
    quota.change(KeyLimits(requests_per_minute=12, tokens_per_minute=5))
    assert b"remaining-requests: 4\r\n" in quota.headers()
    assert b"remaining-tokens: 5\r\n" in quota.headers()
    quota.change(KeyLimits())
    assert quota.headers() == b""
