"""Puts `tests/` on the import path, so that every test finds `ranks`; settings of hypothesis."""

from __future__ import annotations

import hypothesis

# Examples take milliseconds, but a machine that is busy with other processes may stop one for longer than the
# default deadline of 200 ms.
hypothesis.settings.register_profile("apportion", deadline=None)
hypothesis.settings.load_profile("apportion")
