"""What holds for all tests."""

from hypothesis import settings

settings.register_profile("untimed")  # a busy machine is no failure
settings.load_profile("untimed")
