"""Draw pictures with a pipeline: ``strop generate`` and ``strop serve`` do it by this one code."""
