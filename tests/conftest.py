"""For all tests: properties have no deadline (a busy machine is no defect)."""

from hypothesis import settings

settings.register_profile("homeport", deadline=None)
settings.load_profile("homeport")
