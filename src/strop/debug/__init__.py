"""What Strop did with a model: reports for people and for tests."""
