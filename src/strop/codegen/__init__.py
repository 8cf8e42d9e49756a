"""Loop IR -> kernel text (Triton, C++), and the program that launches it."""
