"""The errors of the JAX adapter; all are `flashpoint.errors.FlashpointError`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flashpoint.errors import FlashpointError, LayoutError

_SHOWN_MAX: Final = 10


class OcdbtError(FlashpointError):
    """An OCDBT index that is torn, garbled, or of a kind that cannot be read.

    Not a `ManifestError`: that condemns a version, while an index is made from a sound manifest and can
    be made again.
    """


class NotIndexableError(LayoutError):
    """Arrays that stock TensorStore cannot read where they lie.

    Attributes:
        refused: array name -> why.
    """

    def __init__(self, refused: Mapping[str, str]) -> None:
        self.refused = dict(refused)
        shown = "; ".join(f"{name[:200]!r}: {why}" for name, why in list(self.refused.items())[:_SHOWN_MAX])
        more = f"; and {len(self.refused) - _SHOWN_MAX} more" if len(self.refused) > _SHOWN_MAX else ""
        super().__init__(f"{len(self.refused)} arrays cannot be indexed for TensorStore: {shown}{more}")

    def __reduce__(self) -> tuple[type[NotIndexableError], tuple[dict[str, str]]]:
        return type(self), (self.refused,)
