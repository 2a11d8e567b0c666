"""Settings of all tests: nothing is judged by the time that it takes, since machines are busy.

Property tests try the same examples every time, so that a change is judged by what it changes. Others:
`pytest tests/unit --hypothesis-profile=random`.
"""

from hypothesis import settings

settings.register_profile("random", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
