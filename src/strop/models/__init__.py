"""Hold models that ship inside the package."""
