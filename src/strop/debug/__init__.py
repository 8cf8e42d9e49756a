"""Report what Strop did with a model, for people and for tests."""
