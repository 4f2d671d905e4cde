"""Other tools' formats, made of versions as they lie: a slab of a tensor at a time, whole or not at all."""
