import asyncio

from triptych.runtime.tasks import end


async def test_a_task_that_loses_a_cancel_is_told_again():
    """Proved by telling it once: this never ends."""
    lost = []

    async def deaf():
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if lost:
                    raise
                lost.append(True)

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await end(task)
    assert lost
    assert task.cancelled()


async def test_how_it_ended_does_not_matter():
    async def fails():
        raise ValueError

    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    await end(task)
    await end(task)
