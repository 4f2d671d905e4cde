"""Suites of tests that an implementation of ours or yours inherits to prove itself."""

from flashpoint.testing.coordinator import CoordinatorConformance

__all__ = ["CoordinatorConformance"]
