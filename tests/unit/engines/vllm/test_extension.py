"""How the guard is put over a configuration, and spoken to."""

from types import SimpleNamespace

import pytest

from triptych.engines.vllm import extension
from triptych.errors import InvalidConfig


def configured(**scheduling):
    return SimpleNamespace(scheduler_config=SimpleNamespace(**scheduling))


@pytest.mark.parametrize(
    ("ahead", "name"), [(True, "GuardedAsyncScheduler"), (False, "GuardedScheduler")]
)
def test_it_is_named_as_vllm_schedules(ahead, name):
    config = configured(scheduler_cls=None, async_scheduling=ahead)
    extension.install_scheduler(config)
    assert config.scheduler_config.scheduler_cls == f"triptych.engines.vllm.scheduler.{name}"


def test_another_scheduler_is_refused():
    with pytest.raises(InvalidConfig, match="--scheduler-cls"):
        extension.install_scheduler(
            configured(scheduler_cls="my.Scheduler", async_scheduling=False)
        )


async def test_an_abort_names_its_request_ids():
    told = []

    async def abort(ids):
        told.append(ids)

    llm = SimpleNamespace(engine_core=SimpleNamespace(abort_requests_async=abort))
    await extension.release_blocks(llm, "one-0123abcd")
    await extension.abort_stale(llm, "two-0123abcd")
    assert told == [["one-0123abcd"], ["stale:two-0123abcd"]]
