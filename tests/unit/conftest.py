"""What holds for unit tests."""

from hypothesis import settings

# An example may wait for the machine as long as it likes: no test is about its time.
settings.register_profile("without a deadline", deadline=None)
settings.load_profile("without a deadline")
