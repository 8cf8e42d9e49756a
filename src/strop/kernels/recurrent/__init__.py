"""Kernels for recurrent layers: LSTM, GRU and plain ones."""
