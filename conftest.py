"""What holds for all tests."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # no test asserts on timing
settings.load_profile("untimed")
