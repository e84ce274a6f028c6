"""Marks of tests that need a device; ``conftest`` leaves them out where there is none."""

import pytest

needs_cuda = pytest.mark.cuda
