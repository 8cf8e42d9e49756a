"""Turn loop IR into kernel text (Triton, C++), and make the program that launches it."""
