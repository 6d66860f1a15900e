"""Settings of this room's tests."""

from hypothesis import settings

# a busy machine is no fault: nothing here asserts wall-clock time
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
