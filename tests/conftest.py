"""Settings of all tests: nothing is judged by the time that it takes, since machines are busy."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
