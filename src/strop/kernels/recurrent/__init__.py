"""Kernels compute recurrent layers: LSTM, GRU and plain ones."""
