"""harts_titan chooses torchtitan's device, so it comes before any import of torchtitan."""

import harts_titan  # noqa: F401
